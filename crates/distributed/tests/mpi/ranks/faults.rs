//! Ranks that die and ranks that hang.

use super::common::*;
use super::{say, source};
use crate::LIMIT;
use core::time::Duration;
use flash_sampling_core::{Matrix, PerturbedArgmax, RowParams, Samples};
use flash_sampling_distributed::{Mpi, ShardError, ShardMerge, ShardSampler, Transport, TransportError};
use std::process::{Child, Command};
use std::thread::sleep;
use std::time::Instant;

/// What becomes of a rank.
#[derive(Clone, Copy)]
pub(super) enum Signal {
    Kill,
    Stop,
}

/// When the signal comes: before the rank makes a call, or while it waits in it for a rank that is late.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum When {
    Before,
    Within,
}

/// How late a rank is for the call in which another is killed, which by then has said more than once that it waits.
const LATE: Duration = LIMIT.checked_mul(3).unwrap().checked_div(5).unwrap();

/// A rank that has a signal coming, and the rank that it waits for.
fn victim(world: usize) -> (usize, usize) {
    (world / 2, (world / 2) ^ 1)
}

impl Signal {
    /// Sends itself to this process: now, and this does not return; or in a while, and this returns who does.
    fn to_me(self, when: When) -> Child {
        let (me, after) = (std::process::id(), (LIMIT * 3 / 10).as_secs_f64());
        let wait = if when == When::Within { format!("sleep {after}; ") } else { String::new() };
        let script = match self {
            Signal::Kill => format!("{wait}kill -KILL {me}"),
            // Whoever is stopped cannot end itself: that is seen to before.
            Signal::Stop => {
                format!("{wait}kill -STOP {me}; sleep {}; kill -KILL {me}", (2 * LIMIT).as_secs_f64())
            }
        };
        let mut sender = Command::new("sh").args(["-c", &script]).spawn().unwrap();
        if when == When::Before {
            ends(Some(&mut sender));
        }
        sender
    }
}

/// Where this process has a signal coming, it ends here at the latest.
fn ends(sender: Option<&mut Child>) {
    if let Some(sender) = sender {
        sender.wait().unwrap();
        unreachable!("this process was killed");
    }
}

/// Asserts what a call that began then says of the rank, after the time limit and before half of it more.
fn assert_named(error: &ShardError, victim: usize, begun: Instant) {
    assert_named_within(LIMIT, error, victim, begun);
}

fn assert_named_within(limit: Duration, error: &ShardError, victim: usize, begun: Instant) {
    let took = begun.elapsed();
    let ShardError::Transport(TransportError::TimedOut { ranks, limit: said }) = error else { panic!("{error:?}") };
    assert_eq!((ranks.as_slice(), *said), ([victim].as_slice(), limit));
    assert!(took >= limit && took < limit * 3 / 2, "{took:?}");
}

fn assert_broken(error: &ShardError) {
    assert!(matches!(error, ShardError::Transport(TransportError::Broken)), "{error:?}");
}

/// A rank is killed, or stopped, before the handshake or in it: the others name it within the time limit. What it gave before
/// it died may be all that a rank needs of it to end the handshake: then the first draw names it.
pub(super) fn handshake(mpi: Mpi, signal: Signal, when: When) {
    let mut transport = mpi.with_time_limit(LIMIT);
    let (rank, world) = (transport.rank(), transport.world());
    let (victim, late) = victim(world);
    let weight = integers(VOCAB * HIDDEN, 1);
    let head = head(&weight);
    let local = || shards(&head, &super::starts(world), PLAN).swap_remove(rank);
    let mut sender = (rank == victim).then(|| signal.to_me(when));
    if when == When::Within && rank == late {
        sleep(LATE);
    }
    let begun = Instant::now();
    let made = ShardSampler::new(local(), &mut transport, ShardMerge::Winners);
    ends(sender.as_mut());
    match made {
        Err(error) => assert_named(&error, victim, begun),
        Ok(mut sampler) => {
            assert!(when == When::Within, "a rank that did not come was not missed");
            let (begun, mut out) = (Instant::now(), Samples::new());
            let drawn = sampler.sample(Matrix::new(&hidden(1), 1, HIDDEN).unwrap(), &[RowParams::default()], &mut out);
            assert_named(source(&drawn.unwrap_err()), victim, begun);
            assert_eq!(out.len(), 0);
        }
    }
    assert_broken(&ShardSampler::new(local(), &mut transport, ShardMerge::Winners).unwrap_err());
    say(rank, &format!("missed rank {victim}"));
}

/// A rank is killed, or stopped, by a signal to its process: the others, which draw, name it within the time limit. Before
/// that the first and the last rank come late, so that all others have called the roll in exchanges that did end, also in the
/// very last.
pub(super) fn draw(mpi: Mpi, signal: Signal) {
    let mut transport = mpi.with_time_limit(LIMIT);
    let (rank, world) = (transport.rank(), transport.world());
    let (victim, _) = victim(world);
    let weight = integers(VOCAB * HIDDEN, 1);
    let local = shards(&head(&weight), &super::starts(world), PLAN).swap_remove(rank);
    let mut sampler = ShardSampler::new(local, &mut transport, ShardMerge::Winners).unwrap();
    let (hidden, mut out) = (hidden(2), Samples::new());
    let mut draw = |position: u64| {
        let row = RowParams { position, ..RowParams::default() };
        let input = Matrix::new(&hidden, 2, HIDDEN).unwrap();
        let drawn = sampler.sample(input, &[row, RowParams { seed: 1, ..row }], &mut out);
        (drawn, out.len())
    };
    for position in 0..10 {
        if [(2, 0), (5, world - 1), (9, 0)].contains(&(position, rank)) {
            sleep(LIMIT / 2);
        }
        let (drawn, rows) = draw(position as u64);
        drawn.unwrap();
        assert_eq!(rows, 2);
    }
    if rank == victim {
        ends(Some(&mut signal.to_me(When::Before)));
    }
    let begun = Instant::now();
    let (drawn, rows) = draw(10);
    let error = drawn.unwrap_err();
    assert_named(source(&error), victim, begun);
    assert_eq!(rows, 0);
    let (again, rows) = draw(11);
    assert_broken(source(&again.unwrap_err()));
    assert_eq!(rows, 0);
    say(rank, &format!("{} ({:.1?})", source(&error), begun.elapsed()));
}

/// What ranks do for which an exchange ended.
#[derive(Clone, Copy)]
pub(super) enum Then {
    /// Something else, for longer than the limit.
    Away,
    /// The next exchange, which they give up before the others give up the one before.
    Next,
}

/// A rank is stopped within an exchange that ends for some of the others: all miss that one alone, also the rank for which it
/// does not end, and those that went on to the next.
pub(super) fn elsewhere(mpi: Mpi, then: Then) {
    let mut mpi = mpi.with_time_limit(LIMIT);
    let (rank, world) = (mpi.rank(), mpi.world());
    let (victim, late) = victim(world);
    let mut sender = (rank == victim).then(|| Signal::Stop.to_me(When::Within));
    if rank == late {
        sleep(LATE);
    }
    let (mut begun, mut limit) = (Instant::now(), LIMIT);
    let mut gathered = mpi.all_gather(&[rank as u8], &mut Vec::new());
    ends(sender.as_mut());
    if gathered.is_ok() {
        match then {
            Then::Away => sleep(LIMIT * 6 / 5),
            Then::Next => limit = LIMIT / 2,
        }
        mpi.set_time_limit(limit);
        begun = Instant::now();
        gathered = mpi.all_gather(&[], &mut Vec::new());
    }
    assert_named_within(limit, &gathered.unwrap_err().into(), victim, begun);
    say(rank, &format!("missed rank {victim}"));
}

/// The group ends in order after ranks have called the roll: what they said to the two that came late, of which the first
/// never listened, is taken by nobody.
pub(super) fn ended(mpi: Mpi) {
    let mut mpi = mpi.with_time_limit(LIMIT);
    let (rank, world) = (mpi.rank(), mpi.world());
    for late in [0, world - 1] {
        if rank == late {
            sleep(LIMIT / 2);
        }
        let mut all = Vec::new();
        mpi.all_gather(&[rank as u8], &mut all).unwrap();
        assert_eq!(all.concat(), (0..world as u8).collect::<Vec<_>>());
    }
    let begun = Instant::now();
    drop(mpi);
    let took = begun.elapsed();
    assert!(took < LIMIT, "{took:?}");
    say(rank, "ended in order");
}
