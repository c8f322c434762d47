//! What ranks ask one another over the transport, when a call on their GPUs failed.

use super::CudaRank;
use core::time::Duration;
use flash_sampling_core::{Matrix, RowParams, SampleError};
use flash_sampling_cuda::CudaError;
use flash_sampling_distributed::{CallStatus, ShardError, Transport, TransportError};

/// The part of the time limit for which a rank asks at least.
const LEAST_ASKING: u32 = 8;

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
    fn standing(&self) -> CallStatus<'_> {
        match self {
            Told::Late(ranks, limit) => CallStatus::TimedOut { ranks, limit: *limit },
            _ => CallStatus::Ready,
        }
    }

    /// Whether what the GPUs told stands where the transport names ranks that came late: they named some too, and the
    /// transport does not name rank `mine`; or another call, which it is to a rank that was called otherwise or failed the
    /// one before.
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
    /// What the other ranks say over the transport of a call that failed, in what is left of the limit and at least an
    /// eighth of it, or its own error.
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
                let _ = self.by_host.can_call(input, rows, CallStatus::Failed(&error.to_string()));
            }
            return error;
        }
        // What differs the GPUs do not say. Ranks that were called otherwise all ask, one that goes by the transport alone among
        // them. One that came when this rank had given the call up has gone on from it, and learns so where it meets this.
        let (mine, whole) = (self.by_host.transport().rank(), self.by_host.transport().time_limit());
        // Giving NCCL up may take all the rest. One look would miss every rank that has not asked yet: some time is left for
        // those, who give up at about the same moment.
        self.by_host.transport().set_time_limit(whole.saturating_sub(elapsed).max(whole / LEAST_ASKING));
        let answer = self.by_host.can_call(input, rows, told.standing());
        self.by_host.transport().set_time_limit(whole);
        match answer {
            Err(named @ (ShardError::Mismatch { .. } | ShardError::Params { .. })) => named.into(),
            Err(failed @ ShardError::Failed { .. }) => failed.into(),
            // They came, if late: the limit is the GPUs'.
            Err(ShardError::Late { ranks, .. }) if told.names(&ranks, mine) => error,
            Err(late @ ShardError::Late { .. }) => late.into(),
            // The limit is that of both ways, of which the transport had what was left.
            Err(ShardError::Transport(gone)) if told.names_nobody() => ShardError::from(gone.with_limit(whole)).into(),
            Err(gone) if told.names_nobody() => gone.into(),
            Err(ShardError::Transport(gone)) => waited_for(error, whole, &gone),
            // They came by the transport: only the number of calls differs, or some rank failed one.
            _ => error,
        }
    }
}

/// Of the ranks that the GPUs named, those that came by the transport neither, with the limit of both ways; all of them where
/// the transport does not know. Where all of them came by the transport the error stays as it is.
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
    fn who_came_by_the_transport_is_not_missed() {
        let late = |ranks: &[usize], limit| {
            let source = CudaError::LateRanks { ranks: ranks.to_vec(), limit };
            SampleError::Backend { backend: "test", source: source.into() }
        };
        let (by_gpus, both) = (Duration::from_secs(15), Duration::from_secs(30));
        let timed_out = |ranks: &[usize]| TransportError::TimedOut { ranks: ranks.to_vec(), limit: both };
        let cases: [(TransportError, &[usize], Duration); 6] = [
            (timed_out(&[2]), &[2], both),
            (timed_out(&[2, 3]), &[2], both),
            (timed_out(&[3]), &[1, 2], by_gpus),
            (TransportError::PeerLeft { rank: 1 }, &[1], both),
            (TransportError::Stuck { limit: both }, &[1, 2], by_gpus),
            (TransportError::Broken, &[1, 2], both),
        ];
        for (gone, missed, limit) in cases {
            let said = waited_for(late(&[1, 2], by_gpus), both, &gone);
            assert_eq!(Told::by(&said), Told::Late(missed.to_vec(), limit), "{gone}");
        }
    }
}
