//! The fused tiled variant (paper Alg. 1).

use crate::error::CpuError;
use crate::options::CpuOptions;
use crate::scan::engine::{CHUNK, Call, Engine};
use crate::scan::packed_input::PackedInput;
use flash_sampling_core::sampler::check_call;
use flash_sampling_core::scan::check_scan;
use flash_sampling_core::{
    Capabilities, Exactness, Head, Matrix, PerturbedArgmax, Plan, Request, RowParams, RowSummary, SampleError, Samples,
    Scan, Shape, Variant,
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
    hidden: PackedInput,
}

impl<'w> Tiled<'w> {
    /// Plans a sampler; allocates its scratch. With [`Plan::canonical`] it reads the weight once, for its norms.
    ///
    /// # Errors
    /// * [`CpuError::IsaUnavailable`], [`CpuError::ThreadCount`], [`CpuError::Threads`]: the options.
    /// * [`CpuError::EmptyPlan`], [`CpuError::PlanSize`]: the plan has no rows or no draws, or more than there can be.
    pub fn new(head: Head<'w>, plan: Plan, options: &CpuOptions) -> Result<Self, CpuError> {
        let engine = Engine::new(plan, head.weight().dtype(), options, false)?;
        Ok(Tiled { hidden: PackedInput::new(&head, &plan), head, engine })
    }

    pub(crate) fn into_parts(self) -> (Head<'w>, Engine, PackedInput) {
        (self.head, self.engine, self.hidden)
    }

    pub(crate) fn parts_mut(&mut self) -> (&Head<'w>, &mut Engine, &mut PackedInput) {
        (&self.head, &mut self.engine, &mut self.hidden)
    }

    pub(crate) fn from_parts(head: Head<'w>, engine: Engine, hidden: PackedInput) -> Self {
        Tiled { head, engine, hidden }
    }
}

impl PerturbedArgmax for Tiled<'_> {
    fn capabilities(&self) -> Capabilities {
        self.engine.capabilities(Variant::Tiled, Exactness::Pathwise)
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
        self.engine.sample_pathwise(&self.head, &mut self.hidden, CHUNK, Call { input, rows, can }, out);
        Ok(())
    }

    fn scan(&mut self) -> Option<&mut dyn Scan> {
        (!self.engine.plan.canonical).then_some(self as _)
    }
}

impl Scan for Tiled<'_> {
    fn scan(
        &mut self,
        input: Matrix<'_>,
        rows: &[RowParams<'_>],
        requests: &[Request<'_>],
        out: &mut [RowSummary],
    ) -> Result<(), SampleError> {
        check_scan(&input, rows, requests, out, &self.shape(), &self.plan())?;
        let can = self.capabilities();
        let (head, engine, hidden) = self.parts_mut();
        engine.scan(head, hidden, Call { input, rows, can }, requests, out);
        Ok(())
    }
}
