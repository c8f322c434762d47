//! The query of other ranks over the transport, after a failed call on the GPUs.

use super::CudaRank;
use core::time::Duration;
use flash_sampling_core::{Matrix, RowParams, SampleError};
use flash_sampling_cuda::CudaError;
use flash_sampling_distributed::{CallStatus, ShardError, Transport, TransportError};

/// The divisor of the time limit for the shortest query.
const SHORTEST_QUERY: u32 = 8;

/// The failure that a GPU reports.
#[derive(Clone, Debug, PartialEq, Eq)]
enum GpuFailure {
    /// Some rank was called with other rows or parameters, or failed the previous call.
    OtherCall,
    /// These ranks missed the time limit; empty if the exchange does not know them.
    Late(Vec<usize>, Duration),
    /// NCCL failed, because some rank ended its part.
    Aborted,
    /// This rank failed before the exchange.
    Own,
}

impl GpuFailure {
    fn by(error: &SampleError) -> GpuFailure {
        let SampleError::Backend { source, .. } = error else { return GpuFailure::Own };
        match source.downcast_ref() {
            Some(CudaError::OtherCall { .. }) => GpuFailure::OtherCall,
            Some(CudaError::LateRanks { ranks, limit }) => GpuFailure::Late(ranks.clone(), *limit),
            Some(CudaError::Nccl { .. }) => GpuFailure::Aborted,
            _ => GpuFailure::Own,
        }
    }

    /// The status for the other ranks.
    fn status(&self) -> CallStatus<'_> {
        match self {
            GpuFailure::Late(ranks, limit) => CallStatus::TimedOut { ranks, limit: *limit },
            _ => CallStatus::Ready,
        }
    }

    /// Whether the GPU's error takes precedence over the transport's report of `late` ranks.
    ///
    /// A timeout does if the GPU names ranks too, and the transport does not name rank `mine`. A report of another call
    /// always does.
    fn precedes(&self, late: &[usize], mine: usize) -> bool {
        match self {
            GpuFailure::Late(ranks, _) => !ranks.is_empty() && !late.contains(&mine),
            GpuFailure::OtherCall => true,
            GpuFailure::Aborted | GpuFailure::Own => false,
        }
    }

    /// Whether the GPU names no rank. The transport may name some.
    fn names_no_rank(&self) -> bool {
        matches!(self, GpuFailure::Aborted) || matches!(self, GpuFailure::Late(ranks, _) if ranks.is_empty())
    }
}

impl<T: Transport> CudaRank<'_, T> {
    /// Queries the other ranks over the transport after a failed call, and returns the most precise error.
    ///
    /// The query takes the rest of the time limit, and at least an eighth of it.
    pub(super) fn explain(
        &mut self,
        error: SampleError,
        elapsed: Duration,
        input: Matrix<'_>,
        rows: &[RowParams<'_>],
    ) -> SampleError {
        let failure = GpuFailure::by(&error);
        if failure == GpuFailure::Own {
            return error;
        }
        // The GPUs do not report which parameter differs. After a mismatch, all ranks query the transport, including a
        // rank whose call uses the transport alone. A rank that arrived after this rank's timeout has passed the call.
        // That rank detects this in its next exchange over the transport.
        let (mine, whole) = (self.by_host.transport().rank(), self.by_host.transport().time_limit());
        // Aborting NCCL may take all the rest of the limit. The other ranks begin their query at about the same time,
        // so a query without waiting would miss them.
        self.by_host.transport().set_time_limit(whole.saturating_sub(elapsed).max(whole / SHORTEST_QUERY));
        let answer = self.by_host.can_call(input, rows, failure.status());
        self.by_host.transport().set_time_limit(whole);
        match answer {
            Err(named @ (ShardError::Mismatch { .. } | ShardError::Params { .. })) => named.into(),
            Err(failed @ ShardError::Failed { .. }) => failed.into(),
            // The ranks arrived late, so the GPU's limit applies.
            Err(ShardError::Late { ranks, .. }) if failure.precedes(&ranks, mine) => error,
            Err(late @ ShardError::Late { .. }) => late.into(),
            // The transport waited for the rest of the whole limit, so the error names the whole limit.
            Err(ShardError::Transport(gone)) if failure.names_no_rank() => {
                ShardError::from(gone.with_limit(whole)).into()
            }
            Err(gone) if failure.names_no_rank() => gone.into(),
            Err(ShardError::Transport(gone)) => waited_for(error, whole, &gone),
            // All ranks answered over the transport: only their numbers of calls differ, or some rank failed a call.
            _ => error,
        }
    }
}

/// Restricts an error's late ranks to the ranks that missed the query over the transport too, with the whole limit.
///
/// If the transport does not know its missing ranks, all late ranks stay. If every late rank answered the query, the
/// error is unchanged.
fn waited_for(error: SampleError, limit: Duration, gone: &TransportError) -> SampleError {
    let SampleError::Backend { backend, source } = &error else { return error };
    let Some(CudaError::LateRanks { ranks: late, .. }) = source.downcast_ref() else { return error };
    let is_absent = |rank: &usize| match gone {
        TransportError::TimedOut { ranks, .. } => ranks.contains(rank),
        TransportError::PeerLeft { rank: left } => left == rank,
        TransportError::Stuck { .. } => false,
        _ => true,
    };
    let ranks: Vec<usize> = late.iter().copied().filter(is_absent).collect();
    if ranks.is_empty() {
        return error;
    }
    SampleError::Backend { backend, source: CudaError::LateRanks { ranks, limit }.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_that_answer_over_the_transport_are_not_late() {
        let late = |ranks: &[usize], limit| {
            let source = CudaError::LateRanks { ranks: ranks.to_vec(), limit };
            SampleError::Backend { backend: "test", source: source.into() }
        };
        let (by_gpus, whole) = (Duration::from_secs(15), Duration::from_secs(30));
        let timed_out = |ranks: &[usize]| TransportError::TimedOut { ranks: ranks.to_vec(), limit: whole };
        let cases: [(TransportError, &[usize], Duration); 6] = [
            (timed_out(&[2]), &[2], whole),
            (timed_out(&[2, 3]), &[2], whole),
            (timed_out(&[3]), &[1, 2], by_gpus),
            (TransportError::PeerLeft { rank: 1 }, &[1], whole),
            (TransportError::Stuck { limit: whole }, &[1, 2], by_gpus),
            (TransportError::Broken, &[1, 2], whole),
        ];
        for (gone, missed, limit) in cases {
            let said = waited_for(late(&[1, 2], by_gpus), whole, &gone);
            assert_eq!(GpuFailure::by(&said), GpuFailure::Late(missed.to_vec(), limit), "{gone}");
        }
    }
}
