//! The sampler of a rank's shard, for the exchange on the GPUs and for the exchange over the transport.

use flash_sampling_core::backend::{Batch, Request, RowSummary, Scan};
use flash_sampling_core::{Description, Knob, Matrix, PerturbedArgmax, RowParams, SampleError, Samples};
use flash_sampling_cuda::{CudaError, CudaTiled, DeviceHidden};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The shard's sampler, shared by both exchanges.
#[derive(Clone, Debug)]
pub(super) struct Shared<'w>(Arc<Mutex<CudaTiled<'w>>>);

impl<'w> Shared<'w> {
    pub(super) fn new(sampler: CudaTiled<'w>) -> Self {
        Shared(Arc::new(Mutex::new(sampler)))
    }

    /// Locks the sampler. No code panics while the sampler is in an inconsistent state, so a poisoned lock is harmless.
    pub(super) fn lock(&self) -> MutexGuard<'_, CudaTiled<'w>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Replaces the input of calls by hidden states on the device, until the result is dropped.
    pub(super) fn read_hidden(&self, hidden: &DeviceHidden) -> Result<HiddenInUse<'w>, CudaError> {
        self.lock().set_hidden(Some(hidden.clone()))?;
        Ok(HiddenInUse(self.clone()))
    }
}

/// Hidden states on the device that replace the input of calls.
pub(super) struct HiddenInUse<'w>(Shared<'w>);

impl Drop for HiddenInUse<'_> {
    fn drop(&mut self) {
        // Without hidden states, nothing can fail.
        let _ = self.0.lock().set_hidden(None);
    }
}

impl PerturbedArgmax for Shared<'_> {
    fn description(&self) -> Description {
        self.lock().description()
    }

    fn sample(&mut self, input: Matrix<'_>, rows: &[RowParams<'_>], out: &mut Samples) -> Result<(), SampleError> {
        self.lock().sample(input, rows, out)
    }

    fn scan(&mut self) -> Option<&mut dyn Scan> {
        let can = PerturbedArgmax::scan(&mut *self.lock()).is_some();
        can.then_some(self as _)
    }
}

impl Scan for Shared<'_> {
    fn scan(
        &mut self,
        batch: &Batch<'_, '_>,
        requests: &[Request<'_>],
        out: &mut [RowSummary],
    ) -> Result<(), SampleError> {
        match PerturbedArgmax::scan(&mut *self.lock()) {
            Some(scan) => scan.scan(batch, requests, out),
            None => Err(SampleError::Unsupported { knob: Knob::Canonical }),
        }
    }
}
