//! The fused tiled variant (paper Alg. 1).

use crate::engine::{Engine, Hidden, Summary};
use crate::error::CpuError;
use crate::options::CpuOptions;
use flash_sampling_core::sampler::check_call;
use flash_sampling_core::{
    Capabilities, Exactness, Head, Input, Matrix, PerturbedArgmax, Plan, RowParams, SampleError, Samples, Shape,
    Variant,
};

/// Draws inside the matmul: one pass over the weight for the whole batch, logits never leave their tile, one winner per
/// row and thread is left (paper Alg. 1). Exact pathwise.
///
/// Weight and hidden states in any pair of bf16, f16 and f32; sums in float32. Every number of rows, vocabulary and
/// hidden size; whole multiples of 64 tokens and 32 elements are fastest.
#[derive(Debug)]
pub struct Tiled<'w> {
    head: Head<'w>,
    engine: Engine,
    hidden: Hidden,
}

impl<'w> Tiled<'w> {
    /// Plans a sampler; allocates its scratch. With [`Plan::canonical`] it reads the weight once, for its norms.
    ///
    /// # Errors
    /// * [`CpuError::IsaUnavailable`], [`CpuError::NoThreads`], [`CpuError::Threads`]: the options.
    /// * [`CpuError::EmptyPlan`]: the plan has no rows or no draws.
    pub fn new(head: Head<'w>, plan: Plan, options: &CpuOptions) -> Result<Self, CpuError> {
        let engine = Engine::new(plan, head.hidden(), options, false)?;
        Ok(Tiled { hidden: Hidden::new(&head, &plan), head, engine })
    }
}

impl PerturbedArgmax for Tiled<'_> {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            backend: self.engine.backend(),
            variant: Variant::Tiled,
            exactness: Exactness::Pathwise,
            input: Input::Hidden,
            without_replacement: true,
            filters: false,
            penalties: false,
            canonical: true,
        }
    }

    fn shape(&self) -> Shape {
        Shape { tokens: self.head.tokens(), vocab_size: self.head.vocab_size(), input: self.head.hidden() }
    }

    fn plan(&self) -> Plan {
        self.engine.plan
    }

    fn sample(&mut self, input: Matrix<'_>, rows: &[RowParams<'_>], out: &mut Samples) -> Result<(), SampleError> {
        check_call(&input, rows, &self.shape(), &self.plan())?;
        out.clear();
        let can = self.capabilities();
        let Tiled { head, engine, hidden } = self;
        let dot = hidden.pack(engine, head.weight().dtype(), &input);
        let rows = engine.begin(rows, &can, head.vocab_size(), |r, row| hidden.slack(head, row, &input, r));
        engine.pass(&hidden.source(head, dot), &rows, head.tokens());
        for (r, row) in rows.iter().enumerate() {
            let summary = Summary::from(&engine.workers[0].rows[r]);
            let outcome = row.and_then(|planned| hidden.emit(head, &planned.row, &input, r, &summary, out));
            if let Err(error) = outcome {
                out.push_error(error);
            }
        }
        engine.end(rows);
        Ok(())
    }
}
