//! The parallel-group variant (paper Alg. I.2).

use crate::error::CpuError;
use crate::options::CpuOptions;
use crate::scan::best_group::BestGroup;
use crate::scan::engine::{Call, Engine};
use crate::scan::packed_input::PackedInput;
use crate::scan::tile::Worker;
use crate::simd::SPAN;
use flash_sampling_core::sampler::check_call;
use flash_sampling_core::{
    Capabilities, Exactness, GroupDraw, Head, Knob, Matrix, PerturbedArgmax, Plan, RowParams, SampleError, Samples,
    Shape, Variant,
};

/// Log-mass and local sample of each group of tokens, then a draw of the group (paper Alg. I.2). Groups lie on the
/// absolute grid of multiples of their size, so they are the same in every shard.
#[derive(Debug)]
pub struct Grouped<'w> {
    head: Head<'w>,
    engine: Engine,
    hidden: PackedInput,
    group: u32,
    draw: GroupDraw,
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
                worker.chosen = (0..plan.max_rows).map(|_| BestGroup::new(&plan)).collect();
            }
        }
        Ok(Grouped { hidden: PackedInput::new(&head, &plan), head, engine, group, draw })
    }
}

/// Groups are whole spans of noise.
pub(crate) fn check_group(size: u32) -> Result<(), CpuError> {
    if size == 0 || !size.is_multiple_of(SPAN as u32) { Err(CpuError::GroupSize { size }) } else { Ok(()) }
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
