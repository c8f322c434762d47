//! Ranks in threads: the samples of shards in one process, and typed errors on every rank if one rank fails.

use crate::common::*;
use flash_sampling_core::{Matrix, PerturbedArgmax, Plan, RowParams, SampleError, Samples};
use flash_sampling_distributed::{
    CallStatus, Loopback, ShardError, ShardMerge, ShardOptions, ShardSampler, Sharded, Transport, TransportError,
};
use std::sync::Barrier;

/// Runs a rank in each of eight threads, over the shards that begin at [`STARTS`], with the merge by winners.
fn ranks(rank: impl Fn(usize, &mut ShardSampler<'_, Loopback>) + Sync) {
    samplers(&integer_head(), &STARTS, PLAN, ShardMerge::Winners, rank);
}

/// A call of a sampler with the first columns of hidden states.
fn call(sampler: &mut impl PerturbedArgmax, rows: &[RowParams<'_>], columns: usize) -> Result<(), SampleError> {
    let hidden = hidden(rows.len());
    let input = Matrix::new(&hidden[..rows.len() * columns], rows.len(), columns).unwrap();
    sampler.sample(input, rows, &mut Samples::new())
}

#[test]
fn every_rank_gets_the_samples_of_all_shards_in_one_process() {
    let head = integer_head();
    let (mask, none) = (mask_of(&[2, 3, 999]), mask_of(&[]));
    let calls = [rows(&mask, &none), lists(&mask)];
    for merge in MERGES {
        let mut sharded = Sharded::new(shards(&head, &STARTS, PLAN), merge).unwrap();
        let want: Vec<_> = calls.iter().map(|rows| all(&sample(&mut sharded, &hidden(rows.len()), rows))).collect();
        let got = samplers(&head, &STARTS, PLAN, merge, |_, sampler| {
            // Several steps, so that ranks run ahead of one another.
            let mut last = Vec::new();
            for _ in 0..20 {
                last = calls.iter().map(|rows| all(&sample(sampler, &hidden(rows.len()), rows))).collect();
            }
            last
        });
        for (rank, got) in got.into_iter().enumerate() {
            assert_eq!(got, want, "rank {rank}, {merge:?}");
        }
    }
}

#[test]
fn every_rank_learns_that_the_shards_do_not_fit() {
    let head = integer_head();
    let errors = group(STARTS.len(), |rank, transport| {
        // Rank 4 lacks its last tokens.
        let local = if rank == 4 { head.slice(4..490) } else { head.split(&STARTS).swap_remove(rank) };
        let local = reference(local, PLAN, flash_sampling_core::reference::ReferenceVariant::Tiled);
        ShardSampler::new(local, transport, ShardMerge::Winners).unwrap_err()
    });
    for error in errors {
        // STARTS[3] = 4 begins the long shard; the slice of rank 4 overlaps it.
        assert!(matches!(error, ShardError::Overlap { shard: 4, start: 4, end: 500 }), "{error}");
    }
}

#[test]
fn ranks_must_agree_on_the_merge() {
    let head = integer_head();
    let errors = group(STARTS.len(), |rank, transport| {
        let local = shards(&head, &STARTS, PLAN).swap_remove(rank);
        ShardSampler::new(local, transport, MERGES[usize::from(rank == 6)]).unwrap_err()
    });
    assert!(errors.iter().all(|e| matches!(e, ShardError::Mismatch { shard: 6, what: "merge", .. })));
}

#[test]
fn other_seeds_rows_or_types_on_a_rank_are_an_error_on_every_rank() {
    ranks(|rank, sampler| {
        // A seed that differs between ranks would make the draw wrong on every rank.
        let seeds = [RowParams::default(), RowParams { seed: (rank == 5).into(), ..RowParams::default() }];
        let error = call(sampler, &seeds, HIDDEN).unwrap_err();
        let other = if rank == 5 { 0 } else { 5 };
        assert!(
            matches!(source(&error), ShardError::Params { shard, row: 1, what: "seed" } if *shard == other),
            "{error:?}"
        );
        let error = call(sampler, &seeds[..if rank == 5 { 1 } else { 2 }], HIDDEN).unwrap_err();
        let differs = |error: &SampleError, value| {
            let found = source(error);
            let is_named = matches!(found, ShardError::Mismatch { shard, other: mine, what, .. }
                if (*shard, *mine, *what) == (other, rank, value));
            assert!(is_named, "{found:?}");
        };
        differs(&error, "row count");
        // Another type of hidden states on one rank.
        let (f32s, f16s) = ([0.5f32; HIDDEN], [half::f16::from_f32(0.5); HIDDEN]);
        let input = if rank == 5 { Matrix::new(&f16s, 1, HIDDEN) } else { Matrix::new(&f32s, 1, HIDDEN) }.unwrap();
        let error = sampler.sample(input, &seeds[..1], &mut Samples::new()).unwrap_err();
        differs(&error, "hidden states of type");
        // After the mismatch, equal calls succeed.
        call(sampler, &[RowParams::default(); 2], HIDDEN).unwrap();
    });
}

#[test]
fn a_failed_call_is_an_error_on_every_rank() {
    ranks(|rank, sampler| {
        // Rank 5 also has a mismatch. The failure takes precedence on every rank.
        let rows = [RowParams { seed: (rank == 5).into(), ..RowParams::default() }];
        match call(sampler, &rows, if rank == 2 { HIDDEN - 1 } else { HIDDEN }).unwrap_err() {
            SampleError::Hidden { found, .. } => assert_eq!((rank, found), (2, HIDDEN - 1)),
            error => {
                let failed =
                    matches!(source(&error), ShardError::Failed { shard: 2, reason } if reason.contains("columns"));
                assert!(failed && rank != 2, "{error:?}");
            }
        }
    });
}

/// A call that is exchanged outside the transport.
#[test]
fn a_rank_that_cannot_call_is_an_error_on_every_other_rank() {
    ranks(|rank, sampler| {
        let hidden = hidden(1);
        let input = Matrix::new(&hidden, 1, HIDDEN).unwrap();
        let rows = |seed| [RowParams { seed, ..RowParams::default() }];
        // Rank 5 also has a mismatch. The failure takes precedence.
        let status = if rank == 2 { CallStatus::Failed("no memory") } else { CallStatus::Ready };
        let result = sampler.can_call(input, &rows((rank == 5).into()), status);
        match result {
            Ok(()) => assert_eq!(rank, 2),
            Err(ShardError::Failed { shard, reason }) => assert_eq!((shard, reason.as_str()), (2, "no memory")),
            Err(error) => panic!("{error:?}"),
        }
        let error = sampler.can_call(input, &rows((rank == 5).into()), CallStatus::Ready).unwrap_err();
        assert!(matches!(error, ShardError::Params { row: 0, what: "seed", .. }), "{error:?}");
        // The group continues.
        sampler.can_call(input, &rows(1), CallStatus::Ready).unwrap();
        call(sampler, &rows(1), HIDDEN).unwrap();
    });
}

#[test]
fn a_rank_that_is_gone_is_an_error_on_the_others() {
    // A rank with an error waits for the others. If it left early, the others would name it too.
    let leaves = Barrier::new(STARTS.len() - 1);
    ranks(|rank, sampler| {
        if rank != 3 {
            let error = call(sampler, &[RowParams::default()], HIDDEN).unwrap_err();
            leaves.wait();
            let is_named = matches!(source(&error), ShardError::Transport(TransportError::PeerLeft { rank: 3 }));
            assert!(is_named, "{error:?}");
        }
    });
}

/// A world of 64 over 1000 tokens: four shards have tokens; all others are empty, also at both ends.
#[test]
fn sixty_four_ranks_of_which_many_are_empty_draw_as_in_one_process() {
    let starts: Vec<u32> = (0..64).map(|rank| [0, 0, 7, 7, 8, 500, 500, 1000][rank / 8]).collect();
    let (head, mask, none) = (integer_head(), mask_of(&[2, 3, 999]), mask_of(&[]));
    let rows = rows(&mask, &none);
    for merge in MERGES {
        let mut sharded = Sharded::new(shards(&head, &starts, PLAN), merge).unwrap();
        let want = all(&sample(&mut sharded, &hidden(rows.len()), &rows));
        let got = samplers(&head, &starts, PLAN, merge, |_, sampler| all(&sample(sampler, &hidden(rows.len()), &rows)));
        assert!(got.into_iter().all(|got| got == want), "{merge:?}");
    }
}

/// Differences of the last of two ranks, by the names of the API. Of a plan, only the differing fields are named.
#[test]
fn a_rank_with_another_plan_or_merge_is_named_with_what_differs() {
    let head = integer_head();
    let options = ShardOptions::new(ShardMerge::Winners);
    let more = Plan { max_rows: 17, max_logprobs: None, ..PLAN };
    for (plan, other, says) in [
        (
            more,
            options,
            "shard 1 has a plan with max_rows 17, no max_logprobs, but shard 0 has max_rows 16, max_logprobs 6",
        ),
        (
            Plan { canonical: true, max_draws: 1, ..PLAN },
            options,
            "shard 1 has a plan with max_draws 1, canonical, but shard 0 has max_draws 12, not canonical",
        ),
        (PLAN, ShardMerge::LogMass.into(), "shard 1 has merge log-mass, but shard 0 has winners"),
    ] {
        let errors = group(2, |rank, transport| {
            let (plan, options) = [(PLAN, options), (plan, other)][rank];
            ShardSampler::new(shards(&head, &[0, 500], plan).swap_remove(rank), transport, options).unwrap_err()
        });
        assert!(errors.iter().all(|error| error.to_string() == says), "{errors:?}: {}", errors[0]);
    }
    let planned = Sharded::new(shards(&head, &[0, 500], PLAN), ShardMerge::Winners).unwrap();
    let says = "a plan with max_rows 17 is beyond the shards', with max_rows 16";
    assert_eq!(planned.with_plan(Plan { max_draws: 1, ..more }).unwrap_err().to_string(), says);
}

/// The handshake refuses a description of another version.
#[test]
fn a_rank_of_another_version_is_named_by_all() {
    let head = integer_head();
    let of = |says: &'static [u8]| {
        let errors = group(STARTS.len(), |rank, mut transport| {
            if rank == 6 {
                transport.all_gather(says, &mut Vec::new()).unwrap();
                return None;
            }
            let local = shards(&head, &STARTS, PLAN).swap_remove(rank);
            Some(ShardSampler::new(local, transport, ShardMerge::Winners).unwrap_err())
        });
        errors.into_iter().flatten().map(|error| match error {
            ShardError::Message { shard: 6, source } => source.to_string(),
            error => panic!("{error:?}"),
        })
    };
    // The version is in the first bytes.
    let mut of_another_version = of(b"FS99 and what that version says");
    assert!(of_another_version.all(|says| says.starts_with("the description of another version")));
    // The negative control: bytes of another protocol.
    assert!(of(b"GET / HTTP/1.1").all(|says| says.starts_with("not a shard's description")));
}

#[test]
fn one_rank_is_a_group() {
    let transport: Box<dyn flash_sampling_distributed::Transport> = Box::new(Loopback::group(1).remove(0));
    let plan = Plan { max_logprobs: Some(0), ..Plan::default() };
    let local = shards(&integer_head(), &[0], plan).remove(0);
    let mut sampler = ShardSampler::new(local, transport, ShardMerge::LogMass).unwrap();
    assert!(sample(&mut sampler, &hidden(1), &[RowParams::default()]).row(0).is_ok());
}
