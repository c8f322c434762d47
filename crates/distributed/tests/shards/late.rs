//! Ranks whose draws are exchanged outside the transport. One rank gives up a call before another rank makes it.

use crate::common::*;
use core::error::Error;
use core::time::Duration;
use flash_sampling_core::{Matrix, PerturbedArgmax, RowParams, SampleError, Samples};
use flash_sampling_distributed::{CallStatus, Loopback, ShardError, ShardMerge, ShardSampler};
use std::thread;

const LIMIT: Duration = Duration::from_secs(15);

/// The first exchange of a rank over the transport, after a call outside the transport.
#[derive(Clone, Copy, Debug)]
enum Next {
    /// The rank gave the call up after waiting for these ranks.
    GaveUp(&'static [usize]),
    /// The rank made the call, and compares results.
    Checks,
    /// The rank compares its call with the others, to find a mismatch.
    Asks,
    /// The rank made the call, and is in the next call, over the transport.
    Samples,
    /// The rank has a row that requires the transport for this call.
    SamplesInstead,
}

fn next(sampler: &mut ShardSampler<'_, Loopback>, next: Next) -> ShardError {
    let (hidden, mut out) = (hidden(1), Samples::new());
    let input = Matrix::new(&hidden, 1, HIDDEN).unwrap();
    let row = [RowParams { position: 3, ..RowParams::default() }];
    let other = [RowParams { position: 4, ..row[0] }];
    if !matches!(next, Next::SamplesInstead) {
        sampler.count_call();
    }
    let sampled = match next {
        Next::GaveUp(ranks) => {
            return sampler.can_call(input, &row, CallStatus::TimedOut { ranks, limit: LIMIT }).unwrap_err();
        }
        Next::Asks => return sampler.can_call(input, &row, CallStatus::Ready).unwrap_err(),
        Next::Checks => {
            out.push_error(flash_sampling_core::RowError::NoFiniteLogit);
            return sampler.check_tokens(input, &row, &out).unwrap_err();
        }
        Next::Samples | Next::SamplesInstead => sampler.sample(input, &other, &mut out),
    };
    match sampled {
        Err(SampleError::Backend { source, .. }) => *source.downcast().unwrap(),
        other => panic!("{:?}", other.err().as_ref().and_then(Error::source)),
    }
}

/// The error of each rank.
fn said(ranks: &[Next]) -> Vec<ShardError> {
    let weight = integers(VOCAB * HIDDEN, 1);
    let (head, starts) = (head(&weight), [0, 300, 600]);
    let rank = |(r, transport): (usize, Loopback)| {
        let local = shards(&head, &starts[..ranks.len()], PLAN).swap_remove(r);
        let mut sampler = ShardSampler::new(local, transport, ShardMerge::Winners).unwrap();
        next(&mut sampler, ranks[r])
    };
    thread::scope(|scope| {
        let group = Loopback::group(ranks.len()).into_iter().enumerate();
        let threads: Vec<_> = group.map(|rank_of| scope.spawn(move || rank(rank_of))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn a_rank_that_came_too_late_is_named_whatever_it_does_next() {
    use Next::{Checks, GaveUp, Samples};
    let cases: [(&[Next], usize, &[usize]); 9] = [
        (&[GaveUp(&[1]), Checks], 0, &[1]),
        (&[GaveUp(&[1]), Samples], 0, &[1]),
        (&[Samples, GaveUp(&[0])], 1, &[0]),
        // Rank 1 was in time, and also waited for rank 2.
        (&[GaveUp(&[2]), GaveUp(&[2]), Checks], 0, &[2]),
        (&[GaveUp(&[2]), Checks, Checks], 0, &[2]),
        (&[Checks, GaveUp(&[0, 2]), Samples], 1, &[0, 2]),
        // An exchange without the late ranks' numbers: the ranks that passed the call are named.
        (&[GaveUp(&[]), GaveUp(&[]), Samples], 0, &[2]),
        // Ranks beyond the world are ignored.
        (&[GaveUp(&[7]), Checks], 0, &[1]),
        (&[GaveUp(&[1, 7]), Checks], 0, &[1]),
    ];
    for (ranks, waited, late) in cases {
        for error in said(ranks) {
            let ShardError::Late { shard, ranks: found, limit: LIMIT } = &error else { panic!("{ranks:?}: {error}") };
            assert_eq!((*shard, found.as_slice()), (waited, late), "{ranks:?}");
        }
    }
    let says = |late| ShardError::Late { shard: 0, ranks: late, limit: LIMIT }.to_string();
    assert_eq!(says(vec![1]), "shard 1 came too late: shard 0 had waited 15s");
    assert_eq!(says(vec![1, 2]), "shards 1, 2 came too late: shard 0 had waited 15s");
}

/// The negative control: no rank is late if all ranks are in the same call.
#[test]
fn a_rank_that_was_called_otherwise_is_not_taken_for_a_late_one() {
    for first in [Next::GaveUp(&[1]), Next::Asks] {
        for (rank, error) in said(&[first, Next::SamplesInstead]).into_iter().enumerate() {
            assert!(
                matches!(error, ShardError::Params { shard, row: 0, what: "position" } if shard == 1 - rank),
                "{error}"
            );
        }
    }
}

#[test]
fn results_that_meet_a_question_are_refused_by_name() {
    for (rank, error) in said(&[Next::Asks, Next::Checks]).into_iter().enumerate() {
        let says = ["results to compare, in place of a call", "a call, in place of results to compare"][rank];
        let ShardError::Message { shard, source } = &error else { panic!("{error}") };
        assert!(*shard == 1 - rank && source.to_string().starts_with(says), "{error}: {source}");
    }
}
