//! Merges consecutive groups by a coin (paper Alg. I.3).

use crate::error::CpuError;
use crate::options::CpuOptions;
use crate::scan::engine::{CHUNK, Engine};
use crate::scan::packed_input::PackedInput;
use crate::scan::row_groups::RowGroups;
use crate::variants::grouped::check_group;
use core::ops::Range;
use flash_sampling_core::backend::{Candidate, GroupSummary};
use flash_sampling_core::{
    Description, Exactness, Head, Knob, Matrix, Plan, RowParams, SampleError, Samples, Shape, Variant,
};

/// The state of one row between groups.
#[derive(Debug)]
struct Running {
    groups: RowGroups<GroupSummary<Candidate>>,
    /// The raw logits of the draws, on request.
    raw_logits: Vec<f32>,
}

impl Running {
    fn new(plan: &Plan) -> Self {
        Running { groups: RowGroups::new(plan), raw_logits: Vec::with_capacity(plan.max_draws as usize) }
    }

    /// Sets the raw logits of the draws whose sample belongs to the last group, `tokens`.
    fn set_raw_logits(&mut self, tokens: &Range<u32>, mut raw_logit: impl FnMut(u32) -> f32) {
        for (logit, draw) in self.raw_logits.iter_mut().zip(&self.groups.draws) {
            if let Some(token) = draw.sample.map(|sample| sample.winner.token).filter(|t| tokens.contains(t)) {
                *logit = raw_logit(token);
            }
        }
    }
}

/// Draws from consecutive groups. Keeps one log-mass and one sample per draw between groups.
#[derive(Debug)]
pub(crate) struct GroupSequence {
    engine: Engine,
    hidden: PackedInput,
    /// Tokens per group.
    pub(crate) group: u32,
    running: Vec<Running>,
}

impl GroupSequence {
    /// Plans for heads of the same type and hidden size as `head`. The errors are the errors of
    /// [`Online::new`](crate::Online::new).
    pub(crate) fn new(head: &Head<'_>, plan: Plan, group: u32, options: &CpuOptions) -> Result<Self, CpuError> {
        check_group(group)?;
        if plan.canonical {
            return Err(CpuError::Unsupported { knob: Knob::Canonical });
        }
        let engine = Engine::new(plan, head.weight().dtype(), options, true)?;
        let running = (0..plan.max_rows).map(|_| Running::new(&plan)).collect();
        Ok(GroupSequence { engine, hidden: PackedInput::new(head, &plan), group, running })
    }

    /// Plans for another number of rows.
    pub(crate) fn replan(&mut self, max_rows: usize) -> Result<(), SampleError> {
        self.engine.replan(max_rows)?;
        self.hidden.replan(max_rows);
        self.running.resize_with(max_rows, || Running::new(&self.engine.plan));
        Ok(())
    }

    /// Describes a sampler of this size.
    pub(crate) fn description(&self, shape: Shape) -> Description {
        let capabilities = self.engine.capabilities(Variant::Online, Exactness::InDistribution);
        Description { capabilities, shape, plan: self.engine.plan }
    }

    /// Whether work may leave the caller's thread.
    pub(crate) fn is_parallel(&self) -> bool {
        self.engine.is_parallel()
    }

    /// Draws the rows of a checked call. `for_each` calls its argument for each group of the vocabulary in order, with
    /// the group's tokens and a head that contains them.
    ///
    /// # Errors
    /// The error of `for_each`; then `out` is empty.
    pub(crate) fn sample<E>(
        &mut self,
        of: &Description,
        input: Matrix<'_>,
        rows: &[RowParams<'_>],
        out: &mut Samples,
        for_each: impl FnOnce(&mut (dyn FnMut(Range<u32>, &Head<'_>) + Send)) -> Result<(), E>,
    ) -> Result<(), E> {
        let GroupSequence { engine, hidden, group, running } = self;
        let adjustments = engine.adjustments(rows);
        let rows = engine.begin(rows, &adjustments, of);
        for (planned, running) in rows.iter().zip(&mut *running) {
            if let Ok(planned) = planned {
                running.groups.begin(&planned.row);
                running.raw_logits.clear();
                running.raw_logits.resize(running.groups.draws.len(), f32::NEG_INFINITY);
            }
        }
        let dot = hidden.pack(engine.isa, engine.weight, &input);
        for_each(&mut |tokens, head| {
            let source = hidden.source(head, dot);
            engine.pass(&source, &rows, tokens.clone(), CHUNK, |_, _| {});
            engine.gather(&rows);
            let worker = &mut engine.workers[0];
            for (r, (planned, running)) in rows.iter().zip(&mut *running).enumerate() {
                let Ok(planned) = planned else { continue };
                running.groups.add(&planned.row, tokens.start / *group, &worker.rows[r]);
                if planned.row.raw_logprobs.is_some() {
                    running.set_raw_logits(&tokens, |token| worker.raw_logits(&source, token)(r));
                }
            }
        })?;
        for (r, (row, running)) in rows.iter().zip(running).enumerate() {
            let drawn = row.and_then(|planned| {
                running.groups.summary().emit(&planned.row, out)?;
                Ok(planned.row.draws)
            });
            match drawn {
                // A greedy row keeps one draw, because all its draws are equal.
                Ok(draws) => {
                    let raw_logits = running.raw_logits.iter().copied().cycle().take(draws as usize);
                    running.groups.raw.note(r, raw_logits, out);
                }
                Err(error) => out.push_error(error),
            }
        }
        engine.end(rows);
        engine.keep(adjustments);
        Ok(())
    }
}
