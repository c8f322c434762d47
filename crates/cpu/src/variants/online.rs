//! The online variant (paper Alg. I.3): groups stream through the binary merge.

use crate::error::CpuError;
use crate::options::CpuOptions;
use crate::scan::engine::{CHUNK, Engine, Rows};
use crate::scan::finish::Summary;
use crate::scan::packed_input::PackedInput;
use crate::scan::raw_logprobs::RawState;
use crate::scan::row_state::{Best, RowState};
use crate::scan::tile::Source;
use crate::variants::grouped::check_group;
use core::ops::Range;
use flash_sampling_core::params::Row;
use flash_sampling_core::sampler::check_call;
use flash_sampling_core::{
    Candidate, Capabilities, Exactness, GroupSummary, Head, Knob, LogMass, MassHistogram, Matrix, PerturbedArgmax,
    Plan, RowParams, SampleError, Samples, Shape, StagedError, TopList, Variant,
};

/// Groups of tokens one after another, merged by a coin (paper Alg. I.3). Exact in distribution; what is kept between
/// groups is one log-mass and one sample a draw. Groups lie on the absolute grid of multiples of their size.
///
/// The local sample is drawn in the same pass as the log-mass, where the paper draws it only after the coin: it is the
/// same token, since noise is a pure function, and logits need not be kept.
#[derive(Debug)]
pub struct Online<'w> {
    head: Head<'w>,
    engine: Engine,
    hidden: PackedInput,
    group: u32,
    running: Vec<Running>,
}

/// What is kept of one row between groups.
#[derive(Debug)]
pub(crate) struct Running {
    draws: Vec<GroupSummary<Candidate>>,
    total: MassHistogram,
    top: TopList,
    invalid: Option<StagedError>,
    best: Best,
    raw: RawState,
    /// The raw logits of the draws, where they are asked for.
    raw_logits: Vec<f32>,
}

impl Running {
    pub(crate) fn new(plan: &Plan) -> Self {
        Running {
            draws: Vec::with_capacity(plan.max_draws as usize),
            total: MassHistogram::default(),
            top: TopList::new(plan.max_logprobs.unwrap_or(0) as usize, 0.0),
            invalid: None,
            best: Best::default(),
            raw: RawState::default(),
            raw_logits: Vec::with_capacity(plan.max_draws as usize),
        }
    }

    pub(crate) fn begin(&mut self, row: &Row<'_>) {
        let draws = if row.greedy { 1 } else { row.draws as usize };
        self.draws.clear();
        self.draws.resize(draws, GroupSummary::EMPTY);
        self.total.clear();
        self.top.reset(row.logprobs.unwrap_or(0) as usize, 0.0);
        self.invalid = None;
        self.raw.begin(row);
        self.raw_logits.clear();
        self.raw_logits.resize(draws, f32::NEG_INFINITY);
    }

    /// Merges group `k`, of which `state` is the summary.
    fn add(&mut self, row: &Row<'_>, k: u32, state: &RowState) {
        self.invalid = StagedError::first(self.invalid, state.invalid);
        let mass = state.mass.as_ref().map_or(LogMass::EMPTY, MassHistogram::log_mass);
        if let (true, Some(mass)) = (row.logprobs.is_some(), &state.mass) {
            self.total.merge(mass);
        }
        self.top.merge(&state.top);
        self.raw.merge(&state.raw);
        for ((running, &local), draw) in self.draws.iter_mut().zip(&state.best.winners).zip(row.first_draw..) {
            let sample = (!mass.is_empty()).then_some(local);
            *running = if row.greedy {
                // The argmax needs no coin.
                let best = running.sample.unwrap_or(Candidate::NONE).merge(sample.unwrap_or(Candidate::NONE));
                GroupSummary { mass: running.mass.merge(mass), sample: (!best.winner.is_none()).then_some(best) }
            } else {
                running.merge(GroupSummary { mass, sample }, row.noise.coin(draw, k))
            };
        }
    }

    /// Notes the raw logits of the draws whose sample came with the last group, `tokens`; `raw_logit` knows them.
    fn note_raw_logits(&mut self, tokens: &Range<u32>, mut raw_logit: impl FnMut(u32) -> f32) {
        for (logit, running) in self.raw_logits.iter_mut().zip(&self.draws) {
            if let Some(token) = running.sample.map(|sample| sample.winner.token).filter(|t| tokens.contains(t)) {
                *logit = raw_logit(token);
            }
        }
    }

    /// The row's result.
    pub(crate) fn summary(&mut self) -> Summary<'_> {
        self.best.winners.clear();
        self.best.winners.extend(self.draws.iter().map(|running| running.sample.unwrap_or(Candidate::NONE)));
        Summary {
            invalid: self.invalid,
            has_finite: self.draws.iter().all(|running| running.sample.is_some()),
            best: &self.best,
            mass: Some(&self.total),
            top: self.top.as_slice(),
        }
    }
}

/// Merges group `k`, the tokens of `source` in `tokens`, into what runs.
pub(crate) fn merge_group(
    engine: &mut Engine,
    source: &Source<'_>,
    rows: &Rows<'_>,
    k: u32,
    tokens: Range<u32>,
    running: &mut [Running],
) {
    engine.pass(source, rows, tokens.clone(), CHUNK, |_, _| {});
    engine.gather(rows);
    let worker = &mut engine.workers[0];
    for (r, (planned, running)) in rows.iter().zip(running).enumerate() {
        let Ok(planned) = planned else { continue };
        running.add(&planned.row, k, &worker.rows[r]);
        if planned.row.raw_logprobs.is_some() {
            running.note_raw_logits(&tokens, |token| worker.raw_logits(source, token)(r));
        }
    }
}

/// Begins every valid row.
pub(crate) fn begin_rows(rows: &Rows<'_>, running: &mut [Running]) {
    for (planned, running) in rows.iter().zip(running) {
        if let Ok(planned) = planned {
            running.begin(&planned.row);
        }
    }
}

/// Appends every row's result to `out`.
pub(crate) fn emit_rows(rows: &Rows<'_>, running: &mut [Running], out: &mut Samples) {
    for (r, (row, running)) in rows.iter().zip(running).enumerate() {
        match row.and_then(|planned| running.summary().emit(&planned.row, out).map(|()| planned.row.draws)) {
            // A greedy row keeps one of its draws, which are all the same.
            Ok(draws) => running.raw.note(r, running.raw_logits.iter().copied().cycle().take(draws as usize), out),
            Err(error) => out.push_error(error),
        }
    }
}

impl<'w> Online<'w> {
    /// Plans a sampler with groups of `group` tokens.
    ///
    /// # Errors
    /// * [`CpuError::GroupSize`]: `group` is not a positive multiple of 64.
    /// * [`CpuError::Unsupported`]: [`Plan::canonical`], as this variant is not pathwise.
    /// * Those of [`Tiled::new`](crate::Tiled::new).
    pub fn new(head: Head<'w>, plan: Plan, group: u32, options: &CpuOptions) -> Result<Self, CpuError> {
        check_group(group)?;
        if plan.canonical {
            return Err(CpuError::Unsupported { knob: Knob::Canonical });
        }
        let engine = Engine::new(plan, head.weight().dtype(), options, true)?;
        let running = (0..plan.max_rows).map(|_| Running::new(&plan)).collect();
        Ok(Online { hidden: PackedInput::new(&head, &plan), head, engine, group, running })
    }
}

impl PerturbedArgmax for Online<'_> {
    fn capabilities(&self) -> Capabilities {
        self.engine.capabilities(Variant::Online, Exactness::InDistribution)
    }

    fn shape(&self) -> Shape {
        Shape { tokens: self.head.tokens(), vocab_size: self.head.vocab_size(), input: self.head.hidden() }
    }

    fn plan(&self) -> Plan {
        self.engine.plan
    }

    fn sample(&mut self, input: Matrix<'_>, rows: &[RowParams<'_>], out: &mut Samples) -> Result<(), SampleError> {
        out.clear();
        check_call(&input, rows, &self.shape(), &self.plan())?;
        let can = self.capabilities();
        let Online { head, engine, hidden, group, running } = self;
        let dot = hidden.pack(engine.isa, head.weight().dtype(), &input);
        let adjustments = engine.adjustments(rows);
        let rows = engine.begin(rows, &adjustments, &can, head.vocab_size());
        begin_rows(&rows, running);
        let source = hidden.source(head, dot);
        for (k, tokens) in flash_sampling_core::reference::groups(head.tokens(), *group) {
            merge_group(engine, &source, &rows, k, tokens, running);
        }
        emit_rows(&rows, running, out);
        engine.end(rows);
        engine.keep(adjustments);
        Ok(())
    }

    fn replan(&mut self, max_rows: usize) -> Result<(), SampleError> {
        self.engine.replan(max_rows)?;
        self.hidden.replan(max_rows);
        self.running.resize_with(max_rows, || Running::new(&self.engine.plan));
        Ok(())
    }
}
