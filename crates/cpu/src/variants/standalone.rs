//! The sampler over logits that already exist (paper Alg. I.1).

use crate::error::CpuError;
use crate::options::CpuOptions;
use crate::scan::engine::Engine;
use crate::scan::finish::Summary;
use crate::scan::tile::{LOGITS_TILE, Planned, Source};
use flash_sampling_core::sampler::check_call;
use flash_sampling_core::{
    Capabilities, DType, Exactness, HeadError, Input, Knob, Matrix, PerturbedArgmax, Plan, RowParams, SampleError,
    Samples, Shape, Variant,
};

/// Draws from existing logits, `[rows, vocab]` in bf16, f16 or f32: one streaming pass, no softmax (paper Alg. I.1).
/// Exact pathwise: the draws are those of [`Tiled`](crate::Tiled) on the same logits.
#[derive(Debug)]
pub struct Standalone {
    vocab_size: u32,
    engine: Engine,
}

impl Standalone {
    /// Plans a sampler for logits of `vocab_size` columns.
    ///
    /// # Errors
    /// * [`CpuError::Head`]: `vocab_size` is zero or above 2^32 - 2.
    /// * [`CpuError::Unsupported`]: [`Plan::canonical`], since logits are taken as they are.
    /// * Those of [`Tiled::new`](crate::Tiled::new).
    pub fn new(vocab_size: usize, plan: Plan, options: &CpuOptions) -> Result<Self, CpuError> {
        if plan.canonical {
            return Err(CpuError::Unsupported { knob: Knob::Canonical });
        }
        if vocab_size == 0 || vocab_size >= u32::MAX as usize {
            return Err(HeadError::Vocab { vocab_size, vocab_start: 0, vocab_end: vocab_size }.into());
        }
        let engine = Engine::new(plan, DType::F32, options, false)?;
        Ok(Standalone { vocab_size: vocab_size as u32, engine })
    }
}

impl PerturbedArgmax for Standalone {
    fn capabilities(&self) -> Capabilities {
        let can = self.engine.capabilities(Variant::Standalone, Exactness::Pathwise);
        Capabilities { input: Input::Logits, canonical: false, ..can }
    }

    fn shape(&self) -> Shape {
        Shape { tokens: 0..self.vocab_size, vocab_size: self.vocab_size, input: self.vocab_size as usize }
    }

    fn plan(&self) -> Plan {
        self.engine.plan
    }

    fn sample(&mut self, input: Matrix<'_>, rows: &[RowParams<'_>], out: &mut Samples) -> Result<(), SampleError> {
        out.clear();
        check_call(&input, rows, &self.shape(), &self.plan())?;
        let can = self.capabilities();
        let (engine, vocab_size) = (&mut self.engine, self.vocab_size);
        let adjustments = engine.adjustments(rows);
        let rows = engine.begin(rows, &adjustments, &can, vocab_size, |_, _| 0.0);
        let source = Source::Logits { logits: input, rows: None };
        engine.pass(&source, &rows, 0..vocab_size, LOGITS_TILE as u32);
        engine.settle(&rows, 0..vocab_size, LOGITS_TILE as u32, vocab_size, |members, run| {
            run(&Source::Logits { logits: input, rows: Some(members) });
        });
        for (r, row) in rows.iter().enumerate() {
            let outcome = row.and_then(|Planned { row, .. }| match &row.filters {
                Some(_) => engine.emit_filtered(r, &row, vocab_size, out),
                None => Summary::from(&engine.workers[0].rows[r]).emit(&row, out),
            });
            if let Err(error) = outcome {
                out.push_error(error);
            }
        }
        engine.note_raw(&source, &rows, out);
        engine.end(rows);
        engine.keep(adjustments);
        Ok(())
    }
}
