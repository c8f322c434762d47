//! The fused tiled variant (paper Alg. 1).

use crate::error::CpuError;
use crate::options::CpuOptions;
use crate::scan::engine::{CHUNK, Engine};
use crate::scan::packed_input::PackedInput;
use crate::scan::requests::{HeadLogits, Logits};
use flash_sampling_core::backend::{Batch, Driver, Request, RowSummary, Scan, check_call, check_scan};
use flash_sampling_core::{
    Capabilities, Description, Exactness, Head, Matrix, PerturbedArgmax, Plan, RowParams, SampleError, Samples, Shape,
    Variant,
};

/// The fused tiled sampler: draws within the matmul, in one pass over the weight for the whole batch (paper Alg. 1).
///
/// Logits never leave their tile; one winner per row and thread remains. Exact pathwise. Weight and hidden states are
/// any pair of bf16, f16 and f32; sums are float32. Every number of rows, vocabulary size and hidden size is allowed;
/// multiples of 64 tokens and 32 elements are fastest.
#[derive(Debug)]
pub struct Tiled<'w> {
    pub(super) scan: HeadScan<'w>,
    pub(super) driver: Driver,
}

/// The scan of a head on all threads.
#[derive(Debug)]
pub(super) struct HeadScan<'w> {
    pub(super) engine: Engine,
    pub(super) logits: HeadLogits<'w>,
    /// Tokens that a worker claims at a time.
    pub(super) chunk: u32,
}

impl<'w> HeadScan<'w> {
    /// Plans a scan. With `weigh`, all rows keep masses.
    pub(super) fn new(head: Head<'w>, plan: Plan, options: &CpuOptions, weigh: bool) -> Result<Self, CpuError> {
        let engine = Engine::new(plan, head.weight().dtype(), options, weigh)?;
        let mut hidden = PackedInput::new(&head, &plan);
        if !weigh {
            hidden = hidden.with_bounds(&head, &plan, engine.isa, &engine.threads);
        }
        let mut scan = HeadScan { logits: HeadLogits { hidden, head }, engine, chunk: CHUNK };
        scan.reserve_for_bounds();
        Ok(scan)
    }

    fn reserve_for_bounds(&mut self) {
        let max_rows = self.engine.plan.max_rows;
        if let Some(memory) = self.logits.hidden.bounds_memory(&self.logits.head, max_rows) {
            self.engine.workers.iter_mut().for_each(|worker| worker.reserve_for_bounds(&memory));
        }
    }

    pub(super) fn replan(&mut self, max_rows: usize) -> Result<(), SampleError> {
        self.engine.replan(max_rows)?;
        self.logits.hidden.replan(max_rows);
        self.reserve_for_bounds();
        Ok(())
    }

    /// Describes a sampler with this scan. Draws of small calls may read the head's shadow.
    pub(super) fn description(&self, variant: Variant, exactness: Exactness) -> Description {
        let can = self.engine.capabilities(variant, exactness);
        let capabilities = Capabilities { shadow: self.logits.has_shadow(), ..can };
        Description { capabilities, shape: Shape::of(&self.logits.head), plan: self.engine.plan }
    }
}

impl Scan for HeadScan<'_> {
    fn scan(
        &mut self,
        batch: &Batch<'_, '_>,
        requests: &[Request<'_>],
        out: &mut [RowSummary],
    ) -> Result<(), SampleError> {
        check_scan(batch, requests, out, &Shape::of(&self.logits.head), &self.engine.plan)?;
        self.engine.scan(&mut self.logits, self.chunk, batch, requests, out);
        Ok(())
    }
}

impl<'w> Tiled<'w> {
    /// Plans a sampler, and allocates its scratch. With [`Plan::canonical`], and for a
    /// quantised weight on a processor with AVX-512 VNNI or AMX, reads the weight for its norms.
    ///
    /// # Errors
    /// * [`CpuError::IsaUnavailable`], [`CpuError::ThreadCount`], [`CpuError::Threads`]: the options.
    /// * [`CpuError::EmptyPlan`], [`CpuError::PlanSize`]: the plan has no rows or no draws, or too many.
    pub fn new(head: Head<'w>, plan: Plan, options: &CpuOptions) -> Result<Self, CpuError> {
        Ok(Tiled { scan: HeadScan::new(head, plan, options, false)?, driver: Driver::default() })
    }
}

#[cfg(test)]
impl Tiled<'_> {
    /// Makes every pass without upper bounds.
    pub(crate) fn without_bounds(mut self) -> Self {
        self.scan.logits.hidden.without_bounds();
        self
    }

    /// Makes the shared floors of top-k too high by `error`.
    pub(crate) fn with_error_of_floors(self, error: f32) -> Self {
        for r in 0..self.scan.engine.plan.max_rows {
            self.scan.engine.known.row(r).list.error.store(error.to_bits(), core::sync::atomic::Ordering::Relaxed);
        }
        self
    }
}

impl PerturbedArgmax for Tiled<'_> {
    fn description(&self) -> Description {
        self.scan.description(Variant::Tiled, Exactness::Pathwise)
    }

    fn sample(&mut self, input: Matrix<'_>, rows: &[RowParams<'_>], out: &mut Samples) -> Result<(), SampleError> {
        out.clear();
        let of = self.description();
        check_call(&input, rows, &of.shape, &of.plan)?;
        self.driver.sample(&mut self.scan, &of, input, rows, out)
    }

    fn replan(&mut self, max_rows: usize) -> Result<(), SampleError> {
        self.scan.replan(max_rows)
    }

    fn scan(&mut self) -> Option<&mut dyn Scan> {
        (!self.scan.engine.plan.canonical).then_some(&mut self.scan)
    }
}
