//! Ranks that die and ranks that hang.

use super::common::*;
use super::say;
use crate::LIMIT;
use core::time::Duration;
use flash_sampling_core::{Matrix, PerturbedArgmax, RowParams, Samples};
use flash_sampling_distributed::{Mpi, ShardError, ShardMerge, ShardSampler, Transport, TransportError};
use std::process::{Child, Command};
use std::thread::sleep;
use std::time::Instant;

/// The signal to a rank.
#[derive(Clone, Copy)]
pub(super) enum Signal {
    Kill,
    Stop,
}

/// The time of the signal: before the rank's call, while the rank waits in the call for a late rank, or in the last
/// eighth of the limit, after the rank's last heartbeat.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum SignalTime {
    BeforeCall,
    InCall,
    NearTimeout,
}

impl SignalTime {
    /// The time of a rank in the call before the signal arrives.
    fn signal_delay(self) -> Duration {
        match self {
            SignalTime::BeforeCall => Duration::ZERO,
            SignalTime::InCall => LIMIT * 3 / 10,
            SignalTime::NearTimeout => LIMIT * 18 / 20,
        }
    }

    /// The delay of the late rank. By then the rank with the signal has sent heartbeats more than once.
    fn late_rank_delay(self) -> Duration {
        match self {
            SignalTime::BeforeCall => Duration::ZERO,
            SignalTime::InCall => LIMIT * 3 / 5,
            SignalTime::NearTimeout => LIMIT * 19 / 20,
        }
    }
}

/// The longest time after the limit until a rank is named.
const NAMING_MARGIN: Duration = Duration::from_millis(500);

/// The rank with the signal, and the rank that it waits for.
fn faulty_and_late_rank(world: usize) -> (usize, usize) {
    (world / 2, (world / 2) ^ 1)
}

impl Signal {
    /// Sends the signal to this process: at once, and then does not return; or later, and returns the process that
    /// sends it.
    fn to_me(self, when: SignalTime) -> Child {
        let (me, after) = (std::process::id(), when.signal_delay().as_secs_f64());
        let wait = if when == SignalTime::BeforeCall { String::new() } else { format!("sleep {after}; ") };
        let script = match self {
            Signal::Kill => format!("{wait}kill -KILL {me}"),
            // A stopped process cannot end itself, so the script ends it later.
            Signal::Stop => {
                format!("{wait}kill -STOP {me}; sleep {}; kill -KILL {me}", (5 * LIMIT).as_secs_f64())
            }
        };
        let mut sender = Command::new("sh").args(["-c", &script]).spawn().unwrap();
        if when == SignalTime::BeforeCall {
            wait_for_signal(Some(&mut sender));
        }
        sender
    }
}

/// Waits until the signal ends this process, if it has a sender.
fn wait_for_signal(sender: Option<&mut Child>) {
    if let Some(sender) = sender {
        sender.wait().unwrap();
        unreachable!("this process was killed");
    }
}

/// Asserts that the error names the rank, at the time limit or at most half a second later.
fn assert_named(error: &ShardError, faulty: usize, begun: Instant) {
    assert_named_within(LIMIT, error, faulty, begun);
}

fn assert_named_within(limit: Duration, error: &ShardError, faulty: usize, begun: Instant) {
    let took = begun.elapsed();
    let ShardError::Transport(TransportError::TimedOut { ranks, limit: said }) = error else { panic!("{error:?}") };
    assert_eq!((ranks.as_slice(), *said), ([faulty].as_slice(), limit));
    assert!(took >= limit && took <= limit + NAMING_MARGIN, "{took:?}");
    println!("named after {:.3}", (took - limit).as_secs_f64());
}

fn assert_broken(error: &ShardError) {
    assert!(matches!(error, ShardError::Transport(TransportError::Broken)), "{error:?}");
}

/// A rank is killed or stopped before the handshake or in it; the others name it within the time limit.
///
/// Another rank may have all the data that it needs from the dead rank to end the handshake. Then the first draw names
/// the dead rank.
pub(super) fn handshake(mpi: Mpi, signal: Signal, when: SignalTime) {
    let mut transport = mpi.with_time_limit(LIMIT);
    let (rank, world) = (transport.rank(), transport.world());
    let (faulty, late) = faulty_and_late_rank(world);
    let head = integer_head();
    let local = || shards(&head, &super::starts(world), PLAN).swap_remove(rank);
    let mut sender = (rank == faulty).then(|| signal.to_me(when));
    if rank == late {
        sleep(when.late_rank_delay());
    }
    let begun = Instant::now();
    let made = ShardSampler::new(local(), &mut transport, ShardMerge::Winners);
    wait_for_signal(sender.as_mut());
    match made {
        Err(error) => assert_named(&error, faulty, begun),
        Ok(mut sampler) => {
            assert!(when != SignalTime::BeforeCall, "the handshake ended without a rank");
            let (begun, mut out) = (Instant::now(), Samples::new());
            let drawn = sampler.sample(Matrix::new(&hidden(1), 1, HIDDEN).unwrap(), &[RowParams::default()], &mut out);
            assert_named(source(&drawn.unwrap_err()), faulty, begun);
            assert_eq!(out.len(), 0);
        }
    }
    assert_broken(&ShardSampler::new(local(), &mut transport, ShardMerge::Winners).unwrap_err());
    say(rank, &format!("missed rank {faulty}"));
}

/// A rank is killed or stopped by a signal to its process; the others draw and name it within the time limit.
///
/// Before that the first and the last rank come late. So all other ranks have sent heartbeats in exchanges that ended,
/// also in the last one.
pub(super) fn draw(mpi: Mpi, signal: Signal) {
    let mut transport = mpi.with_time_limit(LIMIT);
    let (rank, world) = (transport.rank(), transport.world());
    let (faulty, _) = faulty_and_late_rank(world);
    let local = shards(&integer_head(), &super::starts(world), PLAN).swap_remove(rank);
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
    if rank == faulty {
        wait_for_signal(Some(&mut signal.to_me(SignalTime::BeforeCall)));
    }
    let begun = Instant::now();
    let (drawn, rows) = draw(10);
    let error = drawn.unwrap_err();
    assert_named(source(&error), faulty, begun);
    assert_eq!(rows, 0);
    let (again, rows) = draw(11);
    assert_broken(source(&again.unwrap_err()));
    assert_eq!(rows, 0);
    say(rank, &format!("{} ({:.1?})", source(&error), begun.elapsed()));
}

/// The next action of ranks whose exchange ended.
#[derive(Clone, Copy)]
pub(super) enum NextAction {
    /// No exchange, for longer than the limit.
    Idle,
    /// The next exchange, with a shorter limit: they give it up before the others give up the earlier one.
    Exchange,
}

/// A rank is stopped in an exchange that ends for some of the others. All name that rank alone: ranks whose exchange
/// does not end, and ranks in the next exchange.
pub(super) fn partly_ended_exchange(mpi: Mpi, then: NextAction) {
    let mut mpi = mpi.with_time_limit(LIMIT);
    let (rank, world) = (mpi.rank(), mpi.world());
    let (faulty, late) = faulty_and_late_rank(world);
    let mut sender = (rank == faulty).then(|| Signal::Stop.to_me(SignalTime::InCall));
    if rank == late {
        sleep(SignalTime::InCall.late_rank_delay());
    }
    let (mut begun, mut limit) = (Instant::now(), LIMIT);
    let mut gathered = mpi.all_gather(&[rank as u8], &mut Vec::new());
    wait_for_signal(sender.as_mut());
    if gathered.is_ok() {
        match then {
            NextAction::Idle => sleep(LIMIT * 6 / 5),
            NextAction::Exchange => limit = LIMIT / 2,
        }
        mpi.set_time_limit(limit);
        begun = Instant::now();
        gathered = mpi.all_gather(&[], &mut Vec::new());
    }
    assert_named_within(limit, &gathered.unwrap_err().into(), faulty, begun);
    say(rank, &format!("missed rank {faulty}"));
}

/// A rank is stopped in an exchange of long messages, while a late rank delays the first part. The second part has only
/// the rest of the limit. An eighth of this limit is half a second.
pub(super) fn long_message(mpi: Mpi) {
    let limit = 2 * LIMIT;
    let mut mpi = mpi.with_time_limit(limit);
    let (rank, world) = (mpi.rank(), mpi.world());
    let (faulty, late) = faulty_and_late_rank(world);
    let mut sender = (rank == faulty).then(|| Signal::Stop.to_me(SignalTime::InCall));
    if rank == late {
        sleep(limit * 19 / 20);
    }
    let begun = Instant::now();
    let gathered = mpi.all_gather(&[rank as u8; 1000], &mut Vec::new());
    wait_for_signal(sender.as_mut());
    assert_named_within(limit, &gathered.unwrap_err().into(), faulty, begun);
    say(rank, &format!("missed rank {faulty}"));
}

/// A rank is stopped before an exchange, and another comes in the last moment. Only the stopped rank is missing.
pub(super) fn beside_late_rank(mpi: Mpi) {
    let mut mpi = mpi.with_time_limit(LIMIT);
    let (rank, world) = (mpi.rank(), mpi.world());
    let (faulty, late) = faulty_and_late_rank(world);
    if rank == faulty {
        wait_for_signal(Some(&mut Signal::Stop.to_me(SignalTime::BeforeCall)));
    }
    if rank == late {
        sleep(SignalTime::NearTimeout.late_rank_delay());
    }
    let begun = Instant::now();
    let gathered = mpi.all_gather(&[rank as u8], &mut Vec::new());
    assert_named(&gathered.unwrap_err().into(), faulty, begun);
    say(rank, &format!("missed rank {faulty}"));
}

/// Ranks that come in the last moment complete an exchange of long messages.
pub(super) fn late_long_message(mpi: Mpi) {
    let mut mpi = mpi.with_time_limit(LIMIT);
    let (rank, world) = (mpi.rank(), mpi.world());
    let mut all = Vec::new();
    for late in 0..world {
        if rank == late {
            sleep(SignalTime::NearTimeout.late_rank_delay());
        }
        let length = 1000 << (2 * late);
        mpi.all_gather(&vec![rank as u8; length], &mut all).unwrap();
        assert!(all.iter().zip(0..).all(|(message, rank)| *message == vec![rank; length]));
    }
    say(rank, "all came");
}

/// The group ends in order after heartbeats. Nobody receives the heartbeats to the two late ranks; the first late rank
/// never began to receive.
pub(super) fn ended_in_order(mpi: Mpi) {
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
