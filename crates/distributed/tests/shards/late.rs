//! Ranks whose draws are exchanged outside the transport. The call of one rank times out before another rank makes it.

use crate::common::*;
use core::error::Error;
use core::time::Duration;
use flash_sampling_core::{Matrix, PerturbedArgmax, RowParams, SampleError, Samples};
use flash_sampling_distributed::{CallStatus, Loopback, ShardError, ShardMerge, ShardSampler};

const LIMIT: Duration = Duration::from_secs(15);

/// The first exchange of a rank over the transport, after a call outside the transport.
#[derive(Clone, Copy, Debug)]
enum FirstExchange {
    /// The call of the rank timed out while it waited for these ranks.
    TimedOut(&'static [usize]),
    /// The rank compares its call with the others, to find a mismatch.
    ComparesCalls,
    /// The rank made the call, and is in the next call, over the transport.
    Samples,
    /// The rank has a row that requires the transport for this call.
    SamplesByTransport,
}

fn first_exchange(sampler: &mut ShardSampler<'_, Loopback>, exchange: FirstExchange) -> ShardError {
    let hidden = hidden(1);
    let input = Matrix::new(&hidden, 1, HIDDEN).unwrap();
    let row = [RowParams { position: 3, ..RowParams::default() }];
    let other = [RowParams { position: 4, ..row[0] }];
    if !matches!(exchange, FirstExchange::SamplesByTransport) {
        sampler.count_call();
    }
    let sampled = match exchange {
        FirstExchange::TimedOut(ranks) => {
            return sampler.can_call(input, &row, CallStatus::TimedOut { ranks, limit: LIMIT }).unwrap_err();
        }
        FirstExchange::ComparesCalls => return sampler.can_call(input, &row, CallStatus::Ready).unwrap_err(),
        FirstExchange::Samples | FirstExchange::SamplesByTransport => {
            sampler.sample(input, &other, &mut Samples::new())
        }
    };
    match sampled {
        Err(SampleError::Backend { source, .. }) => *source.downcast().unwrap(),
        other => panic!("{:?}", other.err().as_ref().and_then(Error::source)),
    }
}

/// The error of each rank.
fn errors(ranks: &[FirstExchange]) -> Vec<ShardError> {
    let starts = &[0, 300, 600][..ranks.len()];
    samplers(&integer_head(), starts, PLAN, ShardMerge::Winners, |rank, sampler| first_exchange(sampler, ranks[rank]))
}

#[test]
fn a_late_rank_is_named_whatever_its_next_exchange_is() {
    use FirstExchange::{Samples, TimedOut};
    let cases: [(&[FirstExchange], usize, &[usize]); 8] = [
        (&[TimedOut(&[1]), Samples], 0, &[1]),
        (&[Samples, TimedOut(&[0])], 1, &[0]),
        // Rank 1 was in time, and also waited for rank 2.
        (&[TimedOut(&[2]), TimedOut(&[2]), Samples], 0, &[2]),
        (&[TimedOut(&[2]), Samples, Samples], 0, &[2]),
        (&[Samples, TimedOut(&[0, 2]), Samples], 1, &[0, 2]),
        // An exchange without the late ranks' numbers: the ranks that passed the call are named.
        (&[TimedOut(&[]), TimedOut(&[]), Samples], 0, &[2]),
        // Ranks beyond the world are ignored.
        (&[TimedOut(&[7]), Samples], 0, &[1]),
        (&[TimedOut(&[1, 7]), Samples], 0, &[1]),
    ];
    for (ranks, waited, late) in cases {
        for error in errors(ranks) {
            let ShardError::Late { shard, ranks: found, limit: LIMIT } = &error else { panic!("{ranks:?}: {error}") };
            assert_eq!((*shard, found.as_slice()), (waited, late), "{ranks:?}");
        }
    }
    let text = |late| ShardError::Late { shard: 0, ranks: late, limit: LIMIT }.to_string();
    assert_eq!(text(vec![1]), "shard 1 came too late: shard 0 had waited 15s");
    assert_eq!(text(vec![1, 2]), "shards 1, 2 came too late: shard 0 had waited 15s");
}

/// The negative control: no rank is late if all ranks are in the same call.
#[test]
fn a_rank_with_another_call_is_not_late() {
    for first in [FirstExchange::TimedOut(&[1]), FirstExchange::ComparesCalls] {
        for (rank, error) in errors(&[first, FirstExchange::SamplesByTransport]).into_iter().enumerate() {
            assert!(
                matches!(error, ShardError::Params { shard, row: 0, what: "position" } if shard == 1 - rank),
                "{error}"
            );
        }
    }
}
