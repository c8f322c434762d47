//! The exchange of winners alone: 8 bytes a row, the same tokens and scores, the same errors; and the check of tokens.

use crate::common::*;
use core::error::Error;
use flash_sampling_core::reference::Scheme;
use flash_sampling_core::{Matrix, PerturbedArgmax, RowError, RowParams, SampleError, Samples, Winner};
use flash_sampling_distributed::{
    Exchange, Loopback, ShardError, ShardMerge, ShardOptions, ShardSampler, Sharded, Transport, TransportError,
};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

const OPTIONS: ShardOptions = ShardOptions {
    merge: ShardMerge::Winners,
    exchange: Exchange::Keys,
    check_tokens: true,
    weight: None,
    transforms: None,
};

/// Counts the words and bytes that cross, and may change what a reduction gives.
struct Meter<'c> {
    inner: Loopback,
    words: &'c AtomicUsize,
    bytes: &'c AtomicUsize,
    damage: fn(usize, &mut [u64]),
}

impl Transport for Meter<'_> {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn world(&self) -> usize {
        self.inner.world()
    }

    fn time_limit(&self) -> core::time::Duration {
        self.inner.time_limit()
    }

    fn set_time_limit(&mut self, limit: core::time::Duration) {
        self.inner.set_time_limit(limit);
    }

    fn all_gather(&mut self, mine: &[u8], all: &mut Vec<Vec<u8>>) -> Result<(), TransportError> {
        self.bytes.fetch_add(mine.len(), Ordering::Relaxed);
        self.inner.all_gather(mine, all)
    }

    fn all_reduce_max(&mut self, values: &mut [u64]) -> Result<(), TransportError> {
        self.words.fetch_add(values.len(), Ordering::Relaxed);
        self.inner.all_reduce_max(values)?;
        (self.damage)(self.inner.rank(), values);
        Ok(())
    }
}

type Answer<R> = (R, usize, usize);

/// Runs a rank in a thread for each shard that begins at `starts`; what each says, and the words and bytes of its calls.
fn ranks<R: Send>(
    starts: &[u32],
    options: ShardOptions,
    damage: fn(usize, &mut [u64]),
    rank: impl Fn(usize, &mut dyn PerturbedArgmax) -> R + Sync,
) -> Vec<Answer<R>> {
    let weight = integers(VOCAB * HIDDEN, 1);
    let head = head(&weight);
    let (rank, head) = (&rank, &head);
    thread::scope(|scope| {
        let spawn = |(r, inner): (usize, Loopback)| {
            scope.spawn(move || {
                let (words, bytes) = (AtomicUsize::new(0), AtomicUsize::new(0));
                let transport = Meter { inner, words: &words, bytes: &bytes, damage };
                let local = shards(head, starts, PLAN).swap_remove(r);
                let mut sampler = ShardSampler::new(local, transport, options).unwrap();
                bytes.store(0, Ordering::Relaxed);
                let said = rank(r, &mut sampler);
                drop(sampler);
                (said, words.into_inner(), bytes.into_inner())
            })
        };
        let threads: Vec<_> = Loopback::group(starts.len()).into_iter().enumerate().map(spawn).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

fn no_damage(_: usize, _: &mut [u64]) {}

fn call(sampler: &mut dyn PerturbedArgmax, rows: &[RowParams<'_>]) -> Result<Samples, SampleError> {
    let (hidden, mut out) = (hidden(rows.len()), Samples::new());
    sampler.sample(Matrix::new(&hidden, rows.len(), HIDDEN).unwrap(), rows, &mut out).map(|()| out)
}

fn source(error: &SampleError) -> &ShardError {
    error.source().and_then(|e| e.downcast_ref()).unwrap()
}

/// Rows that a word is enough for: plain, greedy, masked, without any token, with invalid parameters.
fn plain<'a>(mask: &'a [u32], none: &'a [u32]) -> Vec<RowParams<'a>> {
    let row = RowParams { seed: 5, position: 9, ..RowParams::default() };
    vec![
        row,
        RowParams { temperature: 0.0, ..row },
        RowParams { seed: 6, temperature: 0.7, first_draw: 3, ..row },
        RowParams { mask: Some(mask), logit_bias: &[(999, 2.0)], ..row },
        RowParams { mask: Some(none), ..row },
        RowParams { temperature: f32::NAN, ..row },
    ]
}

#[test]
fn tokens_and_scores_are_those_without_shards_for_worlds_of_1_to_64() {
    let weight = integers(VOCAB * HIDDEN, 1);
    let (mask, none) = (mask_of(&[2, 3, 999]), mask_of(&[]));
    let rows = plain(&mask, &none);
    let mut whole = reference(head(&weight), PLAN, Scheme::Tiled);
    for world in [1u32, 2, 3, 5, 8, 17, 64] {
        // 1000 is a multiple of few of these; some shards of 64 are smaller than others.
        let starts: Vec<u32> = (0..world).map(|r| VOCAB as u32 * r / world).collect();
        let steps = 0..5u64;
        let said = ranks(&starts, ShardOptions { check_tokens: false, ..OPTIONS }, no_damage, |_, sampler| {
            let step = |step: u64| {
                let rows: Vec<_> = rows.iter().map(|row| RowParams { position: row.position + step, ..*row }).collect();
                call(sampler, &rows).unwrap()
            };
            steps.clone().map(step).collect::<Vec<_>>()
        });
        for (rank, (samples, words, bytes)) in said.into_iter().enumerate() {
            for (step, samples) in samples.iter().enumerate() {
                let rows: Vec<_> =
                    rows.iter().map(|row| RowParams { position: row.position + step as u64, ..*row }).collect();
                let want = call(&mut *whole, &rows).unwrap();
                for (got, want) in samples.iter().zip(want.iter()) {
                    match (got, want) {
                        (Ok(got), Ok(want)) => {
                            let (got, want) = (got.draws[0], want.draws[0]);
                            assert_eq!((got.token, got.score.to_bits()), (want.token, want.score.to_bits()));
                            let rounding = 2.0 * f32::EPSILON * (got.score.abs() + got.logit.abs());
                            assert!((got.logit - want.logit).abs() <= rounding, "{got:?} {want:?}");
                        }
                        (got, want) => assert_eq!(got.err(), want.err(), "rank {rank} of {world}"),
                    }
                }
            }
            // A word a row of the plan and three for the call; nothing is gathered.
            assert_eq!((words, bytes), (5 * (3 + PLAN.max_rows), 0), "rank {rank} of {world}");
        }
    }
}

#[test]
fn calls_that_need_more_gather_summaries_with_every_bit() {
    let weight = integers(VOCAB * HIDDEN, 1);
    let (mask, none) = (mask_of(&[2, 3, 999]), mask_of(&[]));
    let calls = [rows(&mask, &none), lists(&mask)];
    let mut sharded = Sharded::new(shards(&head(&weight), &STARTS, PLAN), ShardMerge::Winners).unwrap();
    let want: Vec<_> = calls.iter().map(|rows| all(&call(&mut sharded, rows).unwrap())).collect();
    let said = ranks(&STARTS, OPTIONS, no_damage, |_, sampler| {
        calls.iter().map(|rows| all(&call(sampler, rows).unwrap())).collect::<Vec<_>>()
    });
    for (got, _, bytes) in said {
        assert_eq!(got, want);
        assert!(bytes > 0);
    }
}

#[test]
fn other_parameters_or_rows_on_a_rank_are_an_error_on_every_rank() {
    ranks(&STARTS, OPTIONS, no_damage, |rank, sampler| {
        let other = if rank == 5 { 0 } else { 5 };
        let seeds = [RowParams::default(), RowParams { seed: (rank == 5).into(), ..RowParams::default() }];
        let error = call(sampler, &seeds).unwrap_err();
        assert!(
            matches!(source(&error), ShardError::Params { shard, row: 1, what: "seed" } if *shard == other),
            "{error:?}"
        );
        let error = call(sampler, &seeds[..if rank == 5 { 1 } else { 2 }]).unwrap_err();
        assert!(matches!(source(&error), ShardError::Rows { shard, .. } if *shard == other), "{error:?}");
        // Another type of hidden states on one rank.
        let (f32s, f16s) = ([0.5f32; HIDDEN], [half::f16::from_f32(0.5); HIDDEN]);
        let input =
            if rank == 5 { Matrix::new(&f16s, 1, HIDDEN).unwrap() } else { Matrix::new(&f32s, 1, HIDDEN).unwrap() };
        let error = sampler.sample(input, &[RowParams::default()], &mut Samples::new()).unwrap_err();
        assert!(matches!(source(&error), ShardError::Type { shard, .. } if *shard == other), "{error:?}");
        // And a call that fails on one rank.
        let columns = if rank == 5 { HIDDEN - 1 } else { HIDDEN };
        let input = Matrix::new(&f32s[..columns], 1, columns).unwrap();
        let error = sampler.sample(input, &[RowParams::default()], &mut Samples::new()).unwrap_err();
        match error {
            SampleError::Hidden { .. } => assert_eq!(rank, 5),
            error => assert!(matches!(source(&error), ShardError::Failed { shard: 5, .. }), "{error:?}"),
        }
        call(sampler, &[RowParams::default(); 2]).unwrap();
    });
}

#[test]
fn the_check_of_tokens_names_a_rank_with_another_result() {
    // On rank 6 the reduction loses the winner of row 1: another token of the vocabulary, and nothing else is wrong.
    let damage = |rank: usize, words: &mut [u64]| {
        if rank == 6 {
            words[4] = Winner::new(0.5, 17).to_ordered_bits();
        }
    };
    let rows = [RowParams::default(); 3];
    for (rank, (error, ..)) in
        ranks(&STARTS, OPTIONS, damage, |_, sampler| call(sampler, &rows).unwrap_err()).into_iter().enumerate()
    {
        let other = if rank == 6 { 0 } else { 6 };
        assert!(matches!(source(&error), ShardError::Disagree { shard, row: 1 } if *shard == other), "{error:?}");
    }
    // Without the check nobody finds out: the control of this test.
    let unchecked = ShardOptions { check_tokens: false, ..OPTIONS };
    let said = ranks(&STARTS, unchecked, damage, |_, sampler| tokens(&call(sampler, &rows).unwrap()));
    assert!(said[6].0[1] != said[0].0[1] && said[6].0[1] == Ok(vec![17]));
}

#[test]
fn a_word_that_is_no_winner_is_an_error() {
    let damage = |_: usize, words: &mut [u64]| words[3] = Winner::new(f32::INFINITY, 3).to_ordered_bits();
    for (error, ..) in ranks(&[0, 500], OPTIONS, damage, |_, s| call(s, &[RowParams::default()]).unwrap_err()) {
        assert!(matches!(source(&error), ShardError::Winner { row: 0 }), "{error:?}");
    }
}

#[test]
fn a_bad_row_is_named_though_it_does_not_fit_a_word() {
    let said = ranks(&STARTS, OPTIONS, no_damage, |_, sampler| {
        let mut hidden = hidden(2);
        hidden[HIDDEN + 5] = f32::NAN;
        let mut out = Samples::new();
        sampler.sample(Matrix::new(&hidden, 2, HIDDEN).unwrap(), &[RowParams::default(); 2], &mut out).unwrap();
        tokens(&out)
    });
    for (rows, ..) in said {
        assert!(rows[0].is_ok());
        assert_eq!(rows[1], Err(RowError::NaN { token: 0 }));
    }
}

#[test]
fn winners_are_not_merged_by_log_mass() {
    let weight = integers(VOCAB * HIDDEN, 1);
    let local = shards(&head(&weight), &[0], PLAN).remove(0);
    let options = ShardOptions { merge: ShardMerge::LogMass, ..OPTIONS };
    let error = ShardSampler::new(local, Loopback::group(1).remove(0), options).unwrap_err();
    assert!(matches!(error, ShardError::KeysByMass), "{error}");
}
