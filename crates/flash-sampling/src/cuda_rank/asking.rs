//! What ranks ask one another over the transport, when a call on their GPUs failed.

use super::CudaRank;
use core::time::Duration;
use flash_sampling_core::{Matrix, RowParams, SampleError};
use flash_sampling_cuda::CudaError;
use flash_sampling_distributed::{ShardError, Standing, Transport, TransportError};

/// What the GPUs told of a call that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Told {
    /// Some rank was called with other rows or parameters, or failed the call before.
    OtherCall,
    /// Which ranks did not come in time; none where the exchange does not know.
    Late(Vec<usize>, Duration),
    /// That some broke off.
    BrokeOff,
    /// This rank failed.
    Nothing,
}

impl Told {
    fn by(error: &SampleError) -> Told {
        let SampleError::Backend { source, .. } = error else { return Told::Nothing };
        match source.downcast_ref() {
            Some(CudaError::OtherCall { .. }) => Told::OtherCall,
            Some(CudaError::LateRanks { ranks, limit }) => Told::Late(ranks.clone(), *limit),
            Some(CudaError::Nccl { .. }) => Told::BrokeOff,
            _ => Told::Nothing,
        }
    }

    /// What the other ranks learn of it.
    fn standing(&self) -> Standing<'_> {
        match self {
            Told::Late(ranks, limit) => Standing::Waited { ranks, limit: *limit },
            _ => Standing::Can,
        }
    }

    /// Whether what the GPUs told stands where the transport names ranks that came late: they named some too, and not rank
    /// `mine` itself; or another call, which it is to a rank that was called otherwise or failed the one before.
    fn names(&self, late: &[usize], mine: usize) -> bool {
        match self {
            Told::Late(ranks, _) => !ranks.is_empty() && !late.contains(&mine),
            Told::OtherCall => true,
            Told::BrokeOff | Told::Nothing => false,
        }
    }

    /// Whether the GPUs know no ranks, which the transport may.
    fn names_nobody(&self) -> bool {
        matches!(self, Told::BrokeOff) || matches!(self, Told::Late(ranks, _) if ranks.is_empty())
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
                let _ = self.by_host.can_call(input, rows, Standing::Cannot(&error.to_string()));
            }
            return error;
        }
        // What differs the GPUs do not say. Ranks that were called otherwise all ask, one that goes by the transport alone among
        // them. One that came when this rank had given the call up has gone on from it, and learns so where it meets this.
        let (mine, whole) = (self.by_host.transport().rank(), self.by_host.transport().time_limit());
        self.by_host.transport().set_time_limit(whole.saturating_sub(elapsed));
        let answer = self.by_host.can_call(input, rows, told.standing());
        self.by_host.transport().set_time_limit(whole);
        match answer {
            Err(named @ (ShardError::Type { .. } | ShardError::Rows { .. } | ShardError::Params { .. })) => {
                named.into()
            }
            Err(failed @ ShardError::Failed { .. }) => failed.into(),
            // They came, if late: the limit is the GPUs'.
            Err(ShardError::Late { ranks, .. }) if told.names(&ranks, mine) => error,
            Err(late @ ShardError::Late { .. }) => late.into(),
            Err(gone) if told.names_nobody() => gone.into(),
            Err(ShardError::Transport(TransportError::TimedOut { ranks, .. })) => waited_for(error, whole, &ranks),
            // Only the number of calls differs, or some rank failed one.
            _ => waited_for(error, whole, &[]),
        }
    }
}

/// With the limit of both ways, where ranks did not come by either. Of those that the GPUs named one may have come by the
/// transport, which waited for the `absent`.
fn waited_for(error: SampleError, limit: Duration, absent: &[usize]) -> SampleError {
    let SampleError::Backend { backend, source } = &error else { return error };
    match source.downcast_ref() {
        Some(CudaError::LateRanks { ranks: late, .. }) => {
            let by_neither: Vec<usize> = late.iter().copied().filter(|rank| absent.contains(rank)).collect();
            let ranks = if by_neither.is_empty() { late.clone() } else { by_neither };
            SampleError::Backend { backend, source: CudaError::LateRanks { ranks, limit }.into() }
        }
        _ => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_came_by_the_transport_is_not_missed() {
        let late = |ranks: &[usize], limit| {
            let source = CudaError::LateRanks { ranks: ranks.to_vec(), limit: Duration::from_secs(limit) };
            SampleError::Backend { backend: "test", source: source.into() }
        };
        for (absent, missed) in [(vec![2], vec![2]), (vec![2, 3], vec![2]), (vec![3], vec![1, 2]), (vec![], vec![1, 2])]
        {
            let said = waited_for(late(&[1, 2], 15), Duration::from_secs(30), &absent);
            assert_eq!(said.to_string(), late(&missed, 30).to_string(), "{absent:?}");
            assert_eq!(Told::by(&said), Told::Late(missed, Duration::from_secs(30)));
        }
    }
}
