//! The engine of all variants: threads, their scratch, and passes over tokens.

use crate::dot::{Dot, TILE};
use crate::error::CpuError;
use crate::isa::Isa;
use crate::options::{CpuOptions, Threads};
use crate::scan::filter_state::ListBudget;
use crate::scan::mass_cutoff::SharedBounds;
use crate::scan::parallel_adjustments::ParallelAdjustments;
use crate::scan::requests::RequestedLogit;
use crate::scan::row_state::RowState;
use crate::scan::tile::{Planned, Simd, Source, Worker};
use core::ops::Range;
use core::sync::atomic::{AtomicU64, Ordering};
use flash_sampling_core::backend::reuse_vec;
use flash_sampling_core::backend::selection::{FilterResolver, SummarySpec};
use flash_sampling_core::{
    Capabilities, DType, Description, Exactness, Input, Knob, Knobs, Plan, RowError, RowParams, SampleError, Variant,
};
use rayon::prelude::*;
use std::sync::Arc;

/// Limits of a plan, so that an oversized plan causes an error instead of exhausting memory: rows, the draws of all
/// rows, the log-probabilities of all rows.
const MAX_ROWS: u64 = 1 << 16;
const MAX_DRAWS: u64 = 1 << 26;
const MAX_LOGPROBS: u64 = 1 << 26;
/// Tokens per part, and the maximum number of parts that a worker claims at a time. Claims shrink towards the end, so
/// that all workers end at about the same time. With 594 tiles and 16 workers, constant claims of four parts left
/// eleven workers idle for the last tenth.
pub(crate) const CHUNK: u32 = TILE as u32;
const CLAIM: u64 = 4;

/// The number of row states (rows times workers) from which all threads share the merge.
const SHARED: usize = 256;

/// The length of short lists, summed over all workers, and the minimum per worker. With full lists, each of 16 workers
/// would list 64 of its 9500 tokens to find the first 64 of the row. If the logits above the cutoff are cached, the
/// list is only the first token: top-p took 1.081x the plain draw instead of 1.101x (median, 64 rows, 16 cores of a
/// Xeon with AMX). Rows of few tokens with ties, or with several draws, take a second pass more often.
const SHORT: usize = 128;
const SHORTEST: usize = 8;

/// The checked rows of a call.
pub(crate) type Rows<'a> = Vec<Result<Planned<'a>, RowError>>;

/// Threads, their scratch, and the plan.
#[derive(Debug)]
pub(crate) struct Engine {
    pub(crate) plan: Plan,
    /// Whether all rows keep masses.
    weigh: bool,
    pub(crate) weight: DType,
    pub(crate) isa: Isa,
    simd: Simd,
    pub(crate) threads: Threads,
    pub(crate) workers: Vec<Worker>,
    /// Empty between calls; only its memory is reused.
    rows: Rows<'static>,
    adjustments: ParallelAdjustments,
    /// One resolver per worker.
    pub(crate) resolvers: Vec<FilterResolver>,
    /// The rows that take part in a pass, ascending.
    pub(crate) members: Vec<usize>,
    pub(crate) known: Arc<SharedBounds>,
    pub(crate) requested_logits: Vec<RequestedLogit>,
}

/// Rejects plans without rows or draws, and plans that would exhaust memory.
fn check_size(plan: &Plan) -> Result<(), CpuError> {
    if plan.max_rows == 0 {
        return Err(CpuError::EmptyPlan { knob: Knob::MaxRows });
    }
    if plan.max_draws == 0 {
        return Err(CpuError::EmptyPlan { knob: Knob::Draws });
    }
    let limits = [
        (Knob::MaxRows, plan.max_rows as u64, MAX_ROWS),
        (Knob::Draws, u64::from(plan.max_draws), MAX_DRAWS / plan.max_rows as u64),
        (Knob::Logprobs, u64::from(plan.max_logprobs.unwrap_or(0)), MAX_LOGPROBS / plan.max_rows as u64),
    ];
    match limits.into_iter().find(|(_, requested, limit)| requested > limit) {
        Some((knob, requested, limit)) => Err(CpuError::PlanSize { knob, requested, limit }),
        None => Ok(()),
    }
}

/// Creates the scratch of a plan: bounds that workers share, and one worker per thread.
fn workers(plan: &Plan, (isa, weight): (Isa, DType), weigh: bool, count: usize) -> (Arc<SharedBounds>, Vec<Worker>) {
    let known = Arc::new(SharedBounds::new(plan.max_rows));
    let worker = |_| {
        let rows = (0..plan.max_rows).map(|_| RowState::new(plan, weigh)).collect();
        Worker::new(rows, Dot::scratch(isa, weight, plan.max_rows), Arc::clone(&known))
    };
    let workers = (0..count).map(worker).collect();
    (known, workers)
}

/// The length of the list of a row that workers share.
fn shared_list(source: &Source<'_>, Planned { row, .. }: &Planned<'_>) -> usize {
    match &row.filters {
        Some(filters) if source.has_bounds() => match SummarySpec::of(row, filters) {
            // Rows with frontiers need one token. Rows with masses need all tokens that their min-p keeps.
            SummarySpec { list, frontiers: 0, mass: false, .. } => list,
            _ => 0,
        },
        _ => 0,
    }
}

impl Engine {
    /// Plans for a weight's type. With `weigh`, all rows keep masses.
    pub(crate) fn new(plan: Plan, weight: DType, options: &CpuOptions, weigh: bool) -> Result<Self, CpuError> {
        check_size(&plan)?;
        let isa = options.isa.unwrap_or_else(|| Isa::best_for(DType::BF16, DType::BF16));
        if !isa.is_available() {
            return Err(CpuError::IsaUnavailable { isa, available: Isa::available() });
        }
        let threads = Threads::new(options.threads)?;
        let (known, workers) = workers(&plan, (isa, weight), weigh, threads.count());
        let rows = Vec::with_capacity(plan.max_rows);
        let resolvers = (0..threads.count()).map(|_| FilterResolver::default()).collect();
        Ok(Engine {
            plan,
            weigh,
            weight,
            isa,
            simd: Simd::of(isa),
            threads,
            workers,
            rows,
            adjustments: ParallelAdjustments::default(),
            resolvers,
            known,
            members: Vec::new(),
            requested_logits: Vec::new(),
        })
    }

    /// Plans for another number of rows; see [`PerturbedArgmax::replan`](flash_sampling_core::PerturbedArgmax::replan).
    pub(crate) fn replan(&mut self, max_rows: usize) -> Result<(), SampleError> {
        let plan = Plan { max_rows, ..self.plan };
        check_size(&plan).map_err(|error| SampleError::Backend { backend: "cpu", source: error.into() })?;
        (self.known, self.workers) = workers(&plan, (self.isa, self.weight), self.weigh, self.threads.count());
        self.plan = plan;
        Ok(())
    }

    /// Returns the capabilities of a variant over hidden states.
    pub(crate) fn capabilities(&self, variant: Variant, exactness: Exactness) -> Capabilities {
        let pathwise = exactness == Exactness::Pathwise;
        Capabilities {
            backend: self.backend(),
            variant,
            exactness,
            input: Input::Hidden,
            without_replacement: pathwise,
            knobs: match (self.plan.canonical, pathwise) {
                (true, _) => Knobs::ADJUSTMENTS,
                // The groups of single tokens are no longer available, so their logits cannot be computed.
                (false, false) if variant == Variant::Online => Knobs::ADJUSTMENTS.with(Knob::LogprobsMode),
                (false, false) => Knobs::ADJUSTMENTS.union(Knobs::LOGPROBS),
                (false, true) => Knobs::ADJUSTMENTS.union(Knobs::FILTERS).union(Knobs::LOGPROBS).with(Knob::Kept),
            },
            canonical: pathwise,
            shadow: false,
        }
    }

    /// The instruction set for this weight and bf16 hidden states, as the backend's name.
    pub(crate) fn backend(&self) -> &'static str {
        match self.isa.for_types(self.weight, DType::BF16) {
            Isa::Portable => "cpu (portable)",
            Isa::Avx2 => "cpu (avx2)",
            Isa::Avx512 => "cpu (avx512)",
            Isa::Avx512Bf16 => "cpu (avx512bf16)",
            Isa::Amx => "cpu (amx)",
            Isa::Neon => "cpu (neon)",
        }
    }

    /// Whether work may leave the caller's thread.
    pub(crate) fn is_parallel(&self) -> bool {
        !matches!(self.threads, Threads::One)
    }

    /// Collects the adjustments of a call's rows, in memory that [`Engine::keep`] takes back.
    pub(crate) fn adjustments(&mut self, rows: &[RowParams<'_>]) -> ParallelAdjustments {
        let mut adjustments = core::mem::take(&mut self.adjustments);
        adjustments.collect(rows, &self.threads);
        adjustments
    }

    /// Checks the rows of a call, for a variant without a driver.
    pub(crate) fn begin<'a>(
        &mut self,
        rows: &[RowParams<'a>],
        adjustments: &'a ParallelAdjustments,
        of: &Description,
    ) -> Rows<'a> {
        let mut planned: Rows<'a> = self.take_rows();
        let check = |(r, params): (usize, &RowParams<'a>)| {
            let row = params.check(&[], &of.capabilities, &of.plan, of.shape.vocab_size)?;
            Ok(Planned::new(&row, r, adjustments))
        };
        planned.extend(rows.iter().enumerate().map(check));
        planned
    }

    /// Takes the memory for a call's rows; [`Engine::end`] takes it back.
    pub(crate) fn take_rows<'a>(&mut self) -> Rows<'a> {
        reuse_vec(core::mem::take(&mut self.rows))
    }

    /// Takes the memory of a call's rows back.
    pub(crate) fn end(&mut self, rows: Rows<'_>) {
        self.rows = reuse_vec(rows);
    }

    /// Takes the memory of a call's adjustments back.
    pub(crate) fn keep(&mut self, adjustments: ParallelAdjustments) {
        self.adjustments = adjustments;
    }

    /// Runs `work` for parts of `tokens` that begin at multiples of `chunk`, each on any of the workers.
    ///
    /// Each worker first runs `begin`. On one thread, resets of 64 rows for 16 workers took as long as a tenth of their
    /// work.
    pub(crate) fn for_parts(
        &mut self,
        tokens: Range<u32>,
        chunk: u32,
        begin: impl Fn(&mut Worker) + Sync,
        work: impl Fn(&mut Worker, Range<u32>, Simd) + Sync,
    ) {
        let simd = self.simd;
        let (first, last) = (tokens.start / chunk, tokens.end.div_ceil(chunk));
        let part = |k: u32| {
            (k * chunk).max(tokens.start)..(u64::from(k + 1) * u64::from(chunk)).min(u64::from(tokens.end)) as u32
        };
        let parallel = self.is_parallel();
        let workers = &mut self.workers;
        if !parallel || last - first <= 1 {
            workers.iter_mut().for_each(begin);
            return (first..last).for_each(|k| work(&mut workers[0], part(k), simd));
        }
        let next = AtomicU64::new(u64::from(first));
        let share = 2 * workers.len() as u64;
        self.threads.install(|| {
            workers.par_iter_mut().for_each(|worker| {
                begin(worker);
                let claim = |k| {
                    Some(k + (u64::from(last).checked_sub(k)? / share).clamp(1, CLAIM)).filter(|_| k < u64::from(last))
                };
                while let Ok(k) = next.fetch_update(Ordering::Relaxed, Ordering::Relaxed, claim) {
                    let end = claim(k).unwrap_or(k);
                    (k..end).for_each(|k| work(worker, part(k as u32), simd));
                }
            });
        });
    }

    /// Evaluates `tokens` for all rows on all workers. [`Engine::gather`] or [`Engine::gather_and_decide`] gathers
    /// their states. `begin_row` further prepares a worker's state of a row.
    pub(crate) fn pass(
        &mut self,
        source: &Source<'_>,
        rows: &Rows<'_>,
        tokens: Range<u32>,
        chunk: u32,
        begin_row: impl Fn(usize, &mut RowState) + Sync,
    ) {
        if rows.iter().all(Result::is_err) {
            return;
        }
        self.known.begin(rows.iter().map(|row| row.as_ref().map_or(0, |planned| shared_list(source, planned))));
        let workers = self.workers.len();
        // Rereading existing logits takes less time than caching some of them.
        let top_p = |row: &Planned<'_>| {
            row.is_whole && row.row.filters.as_ref().is_some_and(|filters| filters.only_top_p().is_some())
        };
        let is_head = matches!(source, Source::Head { .. });
        let cutoff = is_head || self.simd.has_fast_cutoff();
        let keep = is_head && rows.iter().flatten().any(top_p);
        let begin = |worker: &mut Worker| {
            let above = keep && worker.above.begin(rows.len(), source.tokens(), workers);
            let list = if above { 1 } else { (SHORT / workers).max(SHORTEST) };
            worker.begin(rows, Some(ListBudget { list, cutoff, above }), true);
            worker.rows.iter_mut().enumerate().for_each(|(r, state)| begin_row(r, state));
        };
        self.for_parts(tokens, chunk, begin, |worker, part, simd| worker.evaluate(source, rows, part, simd));
    }

    /// Whether upper bounds sufficed in at least half of the tiles of the last pass.
    pub(crate) fn most_tiles_have_bounds(&self) -> bool {
        let tiles = self.workers.iter().map(|worker| worker.tiles);
        let [by_bounds, all] = tiles.fold([0, 0], |[a, b], [c, d]| [a + c, b + d]);
        2 * by_bounds >= all
    }

    /// Merges every worker's states into the first worker's.
    pub(crate) fn gather(&mut self, rows: &Rows<'_>) {
        let shared = self.shares_merge(rows);
        let Some((first, others)) = self.workers.split_first_mut() else { return };
        let others = &*others;
        let merge = |(r, (state, row)): (usize, (&mut RowState, &Result<Planned<'_>, RowError>))| {
            if row.is_ok() {
                others.iter().for_each(|other| state.merge(&other.rows[r]));
            }
        };
        if shared {
            self.threads.install(|| first.rows.par_iter_mut().zip(rows).enumerate().for_each(merge));
        } else {
            first.rows.iter_mut().zip(rows).enumerate().for_each(merge);
        }
    }

    /// Whether all threads share the merge of a call's row states.
    fn shares_merge(&self, rows: &Rows<'_>) -> bool {
        self.shares_rows(rows) || self.is_parallel() && rows.len() * self.workers.len() >= SHARED
    }

    /// Whether all threads share the merge and the decision of a call's rows after the pass. Rows with filters take
    /// about 15 microseconds each with 16 workers.
    pub(crate) fn shares_rows(&self, rows: &Rows<'_>) -> bool {
        let filtered = |row: &&Result<Planned<'_>, RowError>| row.is_ok_and(|planned| planned.row.filters.is_some());
        self.is_parallel() && rows.iter().filter(filtered).count() >= 4
    }
}
