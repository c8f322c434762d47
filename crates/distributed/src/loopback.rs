//! The transport between the threads of one process.

use crate::transport::{TIME_LIMIT, Transport, TransportError};
use core::hint::spin_loop;
use core::sync::atomic::{AtomicUsize, Ordering};
use core::time::Duration;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock};
use std::thread::yield_now;
use std::time::Instant;

/// How long a rank polls before it sleeps: ranks in step arrive sooner than a sleeping thread wakes.
const POLL_TIME: Duration = Duration::from_micros(20);
/// The number of polls before the rank yields the core between polls. With more ranks than cores, other ranks may need
/// the core.
const BUSY_POLLS: usize = 64;

/// One rank of a group of threads. Dropping it, also by a panic, releases the ranks that wait for it.
///
/// Messages go through mailboxes, two per rank, used alternately. Two are enough: a rank writes its message of step `s`
/// over that of step `s - 2`. It does so after step `s - 1`, for which every rank has sent a message, and a rank sends
/// that message only after it has read all of step `s - 2`. So one wait per exchange prevents a fast rank from
/// overtaking. Messages are written and read concurrently, outside the lock of the state: 64 rows with filters take
/// some hundred kilobytes.
#[derive(Debug)]
pub struct Loopback {
    rank: usize,
    /// The number of exchanges that this rank has begun.
    step: usize,
    limit: Duration,
    is_broken: bool,
    group: Arc<Group>,
}

#[derive(Debug)]
struct Group {
    /// The number of messages of each rank. Sequentially consistent: if two ranks send last at the same time, one of
    /// them sees that all have sent.
    sent: Vec<AtomicUsize>,
    /// Whether each rank has left. The last sender, or a leaving rank, holds the lock while it wakes the others, so
    /// that no rank falls asleep in between.
    left: Mutex<Vec<bool>>,
    changed: Condvar,
    mailboxes: Vec<Mailboxes>,
}

/// The messages of a rank's last even and last odd step.
#[derive(Debug, Default)]
struct Mailboxes([RwLock<Vec<u8>>; 2]);

impl Loopback {
    /// A group of `world` ranks, in order; one for each thread.
    pub fn group(world: usize) -> Vec<Loopback> {
        let sent = (0..world).map(|_| AtomicUsize::new(0)).collect();
        let left = Mutex::new(vec![false; world]);
        let mailboxes = (0..world).map(|_| Mailboxes::default()).collect();
        let group = Arc::new(Group { sent, left, changed: Condvar::new(), mailboxes });
        let rank = |rank| Loopback { rank, step: 0, limit: TIME_LIMIT, is_broken: false, group: Arc::clone(&group) };
        (0..world).map(rank).collect()
    }

    /// Waits at most this long for the other ranks, in place of [`TIME_LIMIT`]. Every rank needs the same limit.
    pub fn with_time_limit(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// Sends a message, and waits for the messages of all ranks.
    fn exchange(&mut self, mine: &[u8]) -> Result<(), TransportError> {
        if self.is_broken {
            return Err(TransportError::Broken);
        }
        self.is_broken = true;
        let (parity, deadline) = (self.step % 2, Instant::now().checked_add(self.limit));
        self.step += 1;
        let mut message = self.group.mailboxes[self.rank].0[parity].write().unwrap_or_else(PoisonError::into_inner);
        message.clear();
        message.extend_from_slice(mine);
        drop(message);
        let (group, step) = (&*self.group, self.step);
        group.sent[self.rank].store(step, Ordering::SeqCst);
        if group.absent(step).next().is_none() {
            let _left = group.lock();
            group.changed.notify_all();
        } else if !group.come_soon(step) {
            group.sleep(step, deadline, self.limit)?;
        }
        self.is_broken = false;
        Ok(())
    }
}

impl Group {
    /// No code panics while it holds the lock, so the state is whole even if the lock is poisoned.
    fn lock(&self) -> MutexGuard<'_, Vec<bool>> {
        self.left.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The ranks that have not sent their message of a step.
    fn absent(&self, step: usize) -> impl Iterator<Item = usize> + '_ {
        self.sent.iter().enumerate().filter(move |(_, sent)| sent.load(Ordering::SeqCst) < step).map(|(rank, _)| rank)
    }

    /// Polls for a short time; returns whether all ranks have sent.
    fn come_soon(&self, step: usize) -> bool {
        let until = Instant::now() + POLL_TIME;
        for poll in 0.. {
            if self.absent(step).next().is_none() {
                return true;
            }
            if poll < BUSY_POLLS {
                spin_loop();
            } else if Instant::now() < until {
                yield_now();
            } else {
                break;
            }
        }
        false
    }

    /// Sleeps until all ranks have sent.
    fn sleep(&self, step: usize, deadline: Option<Instant>, limit: Duration) -> Result<(), TransportError> {
        let mut left = self.lock();
        while self.absent(step).next().is_some() {
            if let Some(rank) = self.absent(step).find(|&rank| left[rank]) {
                return Err(TransportError::PeerLeft { rank });
            }
            let time = deadline.map_or(Duration::MAX, |deadline| deadline.saturating_duration_since(Instant::now()));
            let ranks: Vec<_> = if time.is_zero() { self.absent(step).collect() } else { Vec::new() };
            if !ranks.is_empty() {
                return Err(TransportError::TimedOut { ranks, limit });
            }
            left = self.changed.wait_timeout(left, time).unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(())
    }
}

impl Transport for Loopback {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world(&self) -> usize {
        self.group.mailboxes.len()
    }

    fn time_limit(&self) -> Duration {
        self.limit
    }

    fn set_time_limit(&mut self, limit: Duration) {
        self.limit = limit;
    }

    fn all_gather(&mut self, mine: &[u8], all: &mut Vec<Vec<u8>>) -> Result<(), TransportError> {
        let parity = self.step % 2;
        self.exchange(mine)?;
        all.resize_with(self.world(), Vec::new);
        for (mine, theirs) in all.iter_mut().zip(&self.group.mailboxes) {
            mine.clone_from(&theirs.0[parity].read().unwrap_or_else(PoisonError::into_inner));
        }
        Ok(())
    }
}

impl Drop for Loopback {
    fn drop(&mut self) {
        self.group.lock()[self.rank] = true;
        self.group.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;
    use std::time::Duration;

    /// What rank `rank` sends at step `step`: contents and length depend on both.
    fn message(rank: usize, step: usize) -> Vec<u8> {
        vec![(rank * 31 + step * 7) as u8; (rank + step) % 5]
    }

    #[test]
    fn every_rank_gets_every_message_of_its_own_step() {
        // Ranks stall at different steps, so that the others run as far ahead as the exchange lets them.
        thread::scope(|scope| {
            for mut transport in Loopback::group(5) {
                scope.spawn(move || {
                    let (rank, mut all) = (transport.rank(), Vec::new());
                    for step in 0..400 {
                        if (step * 13 + rank * 29).is_multiple_of(61) {
                            thread::sleep(Duration::from_millis(1));
                        }
                        transport.all_gather(&message(rank, step), &mut all).unwrap();
                        let want: Vec<_> = (0..transport.world()).map(|r| message(r, step)).collect();
                        assert_eq!(all, want, "rank {rank}, step {step}");
                    }
                });
            }
        });
    }

    #[test]
    fn a_rank_that_leaves_is_an_error_for_the_others_not_a_hang() {
        thread::scope(|scope| {
            for mut transport in Loopback::group(3) {
                scope.spawn(move || {
                    let mut all = Vec::new();
                    let rank = transport.rank();
                    transport.all_gather(b"first", &mut all).unwrap();
                    if rank == 1 {
                        return;
                    }
                    let error = transport.all_gather(b"second", &mut all).unwrap_err();
                    assert!(matches!(error, TransportError::PeerLeft { rank: 1 }));
                });
            }
        });
    }

    #[test]
    fn a_rank_that_hangs_is_named_within_the_time_limit_and_the_group_is_done() {
        let limit = Duration::from_millis(50);
        let mut group = Loopback::group(3);
        // This rank lives, but sends nothing.
        let _hangs = group.remove(1);
        thread::scope(|scope| {
            for transport in group {
                let mut transport = transport.with_time_limit(limit);
                scope.spawn(move || {
                    let begun = Instant::now();
                    let error = transport.all_gather(b"first", &mut Vec::new()).unwrap_err();
                    assert!(matches!(&error, TransportError::TimedOut { ranks, .. } if ranks == &[1]), "{error}");
                    assert!(begun.elapsed() >= limit && begun.elapsed() < 20 * limit);
                    let error = transport.all_gather(b"again", &mut Vec::new()).unwrap_err();
                    assert!(matches!(error, TransportError::Broken), "{error}");
                });
            }
        });
    }

    #[test]
    fn a_limit_beyond_all_clocks_is_none_and_one_of_0_is_one_look() {
        for limit in [Duration::MAX, Duration::from_millis(u64::MAX)] {
            thread::scope(|scope| {
                for mut transport in Loopback::group(2) {
                    scope.spawn(move || {
                        transport.set_time_limit(limit);
                        thread::sleep(Duration::from_millis(5 * transport.rank() as u64));
                        transport.all_gather(b"", &mut Vec::new()).unwrap();
                    });
                }
            });
        }
        let mut group = Loopback::group(2);
        group[0].set_time_limit(Duration::ZERO);
        let error = group[0].all_gather(b"", &mut Vec::new()).unwrap_err();
        assert!(matches!(&error, TransportError::TimedOut { ranks, .. } if ranks == &[1]), "{error}");
        // A message that has arrived is received even with a limit of 0.
        group[1].set_time_limit(Duration::ZERO);
        group[1].all_gather(b"", &mut Vec::new()).unwrap();
    }

    #[test]
    fn a_panic_of_a_rank_releases_the_others() {
        let mut group = Loopback::group(2);
        let (panics, mut waits) = (group.remove(0), group.remove(0));
        let handle = thread::spawn(move || {
            let _transport = panics;
            // `resume_unwind` skips the panic hook, so the test prints no message.
            std::panic::resume_unwind(Box::new("a rank fails"));
        });
        let error = waits.all_gather(b"anyone?", &mut Vec::new()).unwrap_err();
        assert!(matches!(error, TransportError::PeerLeft { rank: 0 }));
        assert!(handle.join().is_err());
    }

    #[test]
    fn the_last_message_of_a_rank_that_leaves_still_arrives() {
        let mut group = Loopback::group(2);
        let (mut goes, mut stays) = (group.remove(0), group.remove(0));
        thread::scope(|scope| {
            scope.spawn(move || goes.all_gather(b"goodbye", &mut Vec::new()).unwrap());
            thread::sleep(Duration::from_millis(2));
            let mut all = Vec::new();
            stays.all_gather(b"hello", &mut all).unwrap();
            assert_eq!(all, [b"goodbye".to_vec(), b"hello".to_vec()]);
        });
    }
}
