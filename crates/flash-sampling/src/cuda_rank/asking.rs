//! What ranks ask one another over the transport, when a call on their GPUs failed.

use super::CudaRank;
use core::time::Duration;
use flash_sampling_core::{Matrix, RowParams, SampleError};
use flash_sampling_cuda::CudaError;
use flash_sampling_distributed::{ShardError, Transport};

/// What the GPUs told of a call that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Told {
    /// Some rank was called with other rows or parameters, or failed the call before.
    OtherCall,
    /// Which ranks did not come.
    Late,
    /// That some did not come or broke off.
    SomeLate,
    /// This rank failed.
    Nothing,
}

impl Told {
    fn by(error: &SampleError) -> Told {
        let SampleError::Backend { source, .. } = error else { return Told::Nothing };
        match source.downcast_ref() {
            Some(CudaError::OtherCall { .. }) => Told::OtherCall,
            Some(CudaError::LateRanks { ranks, .. }) if !ranks.is_empty() => Told::Late,
            Some(CudaError::LateRanks { .. } | CudaError::Nccl { .. }) => Told::SomeLate,
            _ => Told::Nothing,
        }
    }
}

impl<T: Transport> CudaRank<'_, T> {
    /// What the other ranks say over the transport of a call that failed, in what is left of the limit, or its own error.
    pub(super) fn ask(
        &mut self,
        error: SampleError,
        elapsed: Duration,
        input: Matrix<'_>,
        rows: &[RowParams<'_>],
    ) -> SampleError {
        let told = Told::by(&error);
        if told == Told::Nothing {
            if self.check_tokens {
                // The others wait to compare results.
                let _ = self.by_host.can_call(input, rows, Some(&error.to_string()));
            }
            return error;
        }
        // What differs the GPUs do not say. Ranks that were called otherwise all ask, one that goes by the transport alone among
        // them.
        let whole = self.by_host.transport().time_limit();
        self.by_host.transport().set_time_limit(whole.saturating_sub(elapsed));
        let answer = self.by_host.can_call(input, rows, None);
        self.by_host.transport().set_time_limit(whole);
        match answer {
            Err(named @ (ShardError::Type { .. } | ShardError::Rows { .. } | ShardError::Params { .. })) => {
                named.into()
            }
            Err(failed @ ShardError::Failed { .. }) => failed.into(),
            // Who it was, NCCL does not say; the transport may.
            Err(gone) if told == Told::SomeLate => gone.into(),
            // Only the number of calls differs, some rank failed one, or nobody answered.
            _ => waited_for(error, whole),
        }
    }
}

/// With the limit of both ways, where ranks did not come by either.
fn waited_for(error: SampleError, limit: Duration) -> SampleError {
    let SampleError::Backend { backend, source } = &error else { return error };
    match source.downcast_ref() {
        Some(CudaError::LateRanks { ranks, .. }) => {
            SampleError::Backend { backend, source: CudaError::LateRanks { ranks: ranks.clone(), limit }.into() }
        }
        _ => error,
    }
}
