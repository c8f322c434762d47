//! The parallel-group variant (paper Alg. I.2).

use crate::engine::{Call, Engine};
use crate::error::CpuError;
use crate::hidden::Hidden;
use crate::options::CpuOptions;
use crate::raw::RawState;
use crate::simd::SPAN;
use crate::state::{Best, Fault, RowState};
use crate::summary::Summary;
use crate::tile::Worker;
use flash_sampling_core::params::Row;
use flash_sampling_core::sampler::check_call;
use flash_sampling_core::{
    Candidate, Capabilities, Domain, Exactness, GroupDraw, Head, Knob, MassHistogram, Matrix, PerturbedArgmax, Plan,
    RowParams, SampleError, Samples, Shape, TopList, Variant,
};

/// Log-mass and local sample of each group of tokens, then a draw of the group (paper Alg. I.2). Groups lie on the
/// absolute grid of multiples of their size, so they are the same in every shard.
#[derive(Debug)]
pub struct Grouped<'w> {
    head: Head<'w>,
    engine: Engine,
    hidden: Hidden,
    group: u32,
    draw: GroupDraw,
}

/// The groups of one row that a worker has seen.
#[derive(Debug)]
pub(crate) struct Chosen {
    draws: Vec<GroupWinner>,
    total: MassHistogram,
    top: TopList,
    fault: Option<Fault>,
    alive: bool,
    best: Best,
    raw: RawState,
}

impl<'w> Grouped<'w> {
    /// Plans a sampler with groups of `group` tokens.
    ///
    /// # Errors
    /// * [`CpuError::GroupSize`]: `group` is not a positive multiple of 64.
    /// * [`CpuError::Unsupported`]: [`Plan::canonical`] with [`GroupDraw::Fresh`], which is not pathwise.
    /// * Those of [`Tiled::new`](crate::Tiled::new).
    pub fn new(
        head: Head<'w>,
        plan: Plan,
        group: u32,
        draw: GroupDraw,
        options: &CpuOptions,
    ) -> Result<Self, CpuError> {
        check_group(group)?;
        if plan.canonical && draw == GroupDraw::Fresh {
            return Err(CpuError::Unsupported { knob: Knob::Canonical });
        }
        let fresh = draw == GroupDraw::Fresh;
        let mut engine = Engine::new(plan, head.weight().dtype(), options, fresh)?;
        if fresh {
            for worker in &mut engine.workers {
                worker.chosen = (0..plan.max_rows).map(|_| Chosen::new(&plan)).collect();
            }
        }
        Ok(Grouped { hidden: Hidden::new(&head, &plan), head, engine, group, draw })
    }
}

/// Groups are whole spans of noise.
pub(crate) fn check_group(size: u32) -> Result<(), CpuError> {
    if size == 0 || !size.is_multiple_of(SPAN as u32) { Err(CpuError::GroupSize { size }) } else { Ok(()) }
}

impl Chosen {
    fn new(plan: &Plan) -> Self {
        Chosen {
            draws: Vec::with_capacity(plan.max_draws as usize),
            total: MassHistogram::default(),
            top: TopList::new(plan.max_logprobs.unwrap_or(0) as usize, 0.0),
            fault: None,
            alive: false,
            best: Best::default(),
            raw: RawState::default(),
        }
    }

    fn begin(&mut self, row: &Row<'_>) {
        let draws = if row.greedy { 1 } else { row.draws as usize };
        self.draws.clear();
        self.draws.resize(draws, GroupWinner::NONE);
        self.total.clear();
        self.top.reset(row.logprobs.unwrap_or(0) as usize, 0.0);
        self.fault = None;
        self.alive = false;
        self.raw.begin(row);
    }

    /// Adds group `k`, of which `state` is the summary.
    fn add(&mut self, row: &Row<'_>, k: u32, state: &RowState) {
        self.fault = Fault::first(self.fault, state.fault);
        self.raw.merge(&state.raw);
        let Some(mass) = state.mass.as_ref().filter(|mass| !mass.is_empty()) else { return };
        self.alive = true;
        self.top.merge(&state.top);
        if row.logprobs.is_some() {
            self.total.merge(mass);
        }
        let log_mass = mass.log_z();
        for ((best, &sample), draw) in self.draws.iter_mut().zip(&state.best.winners).zip(row.first_draw..) {
            let score = if row.greedy {
                f64::from(sample.winner.score)
            } else {
                log_mass + f64::from(row.noise.gumbel(Domain::Group, draw, k))
            };
            *best = best.merge(GroupWinner { score, group: k, sample });
        }
    }

    /// Adds the groups that another worker has seen.
    fn merge(&mut self, other: &Chosen) {
        self.fault = Fault::first(self.fault, other.fault);
        self.alive |= other.alive;
        self.top.merge(&other.top);
        self.total.merge(&other.total);
        self.raw.merge(&other.raw);
        for (a, &b) in self.draws.iter_mut().zip(&other.draws) {
            *a = a.merge(b);
        }
    }

    /// The row's result.
    fn summary(&mut self) -> Summary<'_> {
        self.best.winners.clear();
        self.best.winners.extend(self.draws.iter().map(|winner| winner.sample));
        Summary {
            fault: self.fault,
            alive: self.alive,
            best: &self.best,
            mass: Some(&self.total),
            top: self.top.as_slice(),
        }
    }
}

/// The best group of a draw: the larger score wins, then the lower number.
#[derive(Clone, Copy, Debug)]
struct GroupWinner {
    score: f64,
    group: u32,
    sample: Candidate,
}

impl GroupWinner {
    const NONE: GroupWinner = GroupWinner { score: f64::NEG_INFINITY, group: u32::MAX, sample: Candidate::NONE };

    fn merge(self, other: GroupWinner) -> GroupWinner {
        let wins = other.score > self.score || (other.score == self.score && other.group < self.group);
        if wins { other } else { self }
    }
}

impl PerturbedArgmax for Grouped<'_> {
    fn capabilities(&self) -> Capabilities {
        let exactness = match self.draw {
            GroupDraw::Fresh => Exactness::InDistribution,
            GroupDraw::Reuse => Exactness::Pathwise,
        };
        self.engine.capabilities(Variant::Grouped, exactness)
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
        let Grouped { head, engine, hidden, group, draw } = self;
        if *draw == GroupDraw::Reuse {
            engine.sample_pathwise(head, hidden, *group, Call { input, rows, can }, out);
            return Ok(());
        }
        let dot = hidden.pack(engine, head.weight().dtype(), &input);
        let adjustments = engine.adjustments(rows);
        let rows = engine.begin(rows, &adjustments, &can, head.vocab_size(), |_, _| 0.0);
        let active = |r: usize| rows[r].as_ref().ok().map(|planned| planned.row);
        let begin = |worker: &mut Worker| {
            for (r, chosen) in worker.chosen[..rows.len()].iter_mut().enumerate() {
                if let Some(row) = active(r) {
                    chosen.begin(&row);
                }
            }
        };
        let source = hidden.source(head, dot);
        engine.for_parts(head.tokens(), *group, begin, |worker, tokens, simd| {
            worker.begin(&rows, None, false);
            worker.evaluate(&source, &rows, tokens.clone(), simd);
            let k = tokens.start / *group;
            for (r, (chosen, state)) in worker.chosen.iter_mut().zip(&worker.rows).enumerate().take(rows.len()) {
                if let Some(row) = active(r) {
                    chosen.add(&row, k, state);
                }
            }
        });
        let Some((first, others)) = engine.workers.split_first_mut() else { return Ok(()) };
        for (r, row) in rows.iter().enumerate() {
            let chosen = &mut first.chosen[r];
            let outcome = row.and_then(|planned| {
                others.iter().for_each(|other| chosen.merge(&other.chosen[r]));
                chosen.summary().emit(&planned.row, out)
            });
            if let Err(error) = outcome {
                out.push_error(error);
            }
            core::mem::swap(&mut chosen.raw, &mut first.rows[r].raw);
        }
        engine.note_raw(&source, &rows, out);
        engine.end(rows);
        engine.keep(adjustments);
        Ok(())
    }
}
