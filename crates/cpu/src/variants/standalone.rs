//! The sampler over existing logits (paper Alg. I.1).

use crate::error::CpuError;
use crate::options::CpuOptions;
use crate::scan::engine::Engine;
use crate::scan::requests::ExistingLogits;
use crate::scan::tile::LOGITS_TILE;
use flash_sampling_core::backend::{Batch, Driver, Request, RowSummary, Scan, check_call};
use flash_sampling_core::{
    Capabilities, DType, Description, Exactness, HeadError, Input, Knob, Matrix, PerturbedArgmax, Plan, RowParams,
    SampleError, Samples, Shape, Variant,
};

/// Draws from existing logits, `[rows, vocab]` in bf16, f16 or f32: one streaming pass, no softmax (paper Alg. I.1).
///
/// Exact pathwise: the draws equal the draws of [`Tiled`](crate::Tiled) on the same logits.
#[derive(Debug)]
pub struct Standalone {
    scan: LogitsScan,
    driver: Driver,
}

/// The scan of existing logits on all threads.
#[derive(Debug)]
struct LogitsScan {
    engine: Engine,
    logits: ExistingLogits,
}

impl Scan for LogitsScan {
    fn scan(
        &mut self,
        batch: &Batch<'_, '_>,
        requests: &[Request<'_>],
        out: &mut [RowSummary],
    ) -> Result<(), SampleError> {
        self.engine.scan(&mut self.logits, LOGITS_TILE as u32, batch, requests, out);
        Ok(())
    }
}

impl Standalone {
    /// Plans a sampler for logits of `vocab_size` columns.
    ///
    /// # Errors
    /// * [`CpuError::Head`]: `vocab_size` is zero or above 2^32 - 2.
    /// * [`CpuError::Unsupported`]: [`Plan::canonical`], because the logits are given.
    /// * Errors of [`Tiled::new`](crate::Tiled::new).
    pub fn new(vocab_size: usize, plan: Plan, options: &CpuOptions) -> Result<Self, CpuError> {
        if plan.canonical {
            return Err(CpuError::Unsupported { knob: Knob::Canonical });
        }
        if vocab_size == 0 || vocab_size >= u32::MAX as usize {
            return Err(HeadError::Vocab { vocab_size, vocab_start: 0, vocab_end: vocab_size }.into());
        }
        let engine = Engine::new(plan, DType::F32, options, false)?;
        let logits = ExistingLogits { vocab_size: vocab_size as u32 };
        Ok(Standalone { scan: LogitsScan { engine, logits }, driver: Driver::default() })
    }
}

impl PerturbedArgmax for Standalone {
    fn description(&self) -> Description {
        let LogitsScan { engine, logits: ExistingLogits { vocab_size } } = &self.scan;
        let can = engine.capabilities(Variant::Standalone, Exactness::Pathwise);
        let capabilities = Capabilities { input: Input::Logits, canonical: false, ..can };
        Description { capabilities, shape: Shape::whole(*vocab_size, *vocab_size as usize), plan: engine.plan }
    }

    fn sample(&mut self, input: Matrix<'_>, rows: &[RowParams<'_>], out: &mut Samples) -> Result<(), SampleError> {
        out.clear();
        let of = self.description();
        check_call(&input, rows, &of.shape, &of.plan)?;
        self.driver.sample(&mut self.scan, &of, input, rows, out)
    }

    fn replan(&mut self, max_rows: usize) -> Result<(), SampleError> {
        self.scan.engine.replan(max_rows)
    }
}
