//! The transport between the threads of one process.

use crate::transport::{Transport, TransportError};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// One rank of a group of threads. Dropping it, also by a panic, releases the ranks that wait for it.
///
/// Messages go through mailboxes, two per rank, used in turn. Two are enough: a rank writes its message of step `s` over
/// that of step `s - 2`; it does so after step `s - 1`, for which every rank had sent a message, and a rank sends that
/// message only when it has read all of step `s - 2`. So one wait per exchange keeps a fast rank from overtaking.
#[derive(Debug)]
pub struct Loopback {
    rank: usize,
    /// Exchanges that this rank has begun.
    step: usize,
    group: Arc<Group>,
}

#[derive(Debug)]
struct Group {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    ranks: Vec<Mailboxes>,
}

#[derive(Clone, Debug, Default)]
struct Mailboxes {
    /// The messages of the last even and the last odd step.
    messages: [Vec<u8>; 2],
    /// Messages sent so far.
    sent: usize,
    left: bool,
}

impl Loopback {
    /// A group of `world` ranks, in order; one for each thread.
    pub fn group(world: usize) -> Vec<Loopback> {
        let state = Mutex::new(State { ranks: vec![Mailboxes::default(); world] });
        let group = Arc::new(Group { state, changed: Condvar::new() });
        (0..world).map(|rank| Loopback { rank, step: 0, group: Arc::clone(&group) }).collect()
    }
}

impl Group {
    /// No code panics while it holds the lock, so the state is whole even if the lock is poisoned.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Transport for Loopback {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world(&self) -> usize {
        self.group.lock().ranks.len()
    }

    fn all_gather(&mut self, mine: &[u8], all: &mut Vec<Vec<u8>>) -> Result<(), TransportError> {
        let parity = self.step % 2;
        self.step += 1;
        let mut state = self.group.lock();
        let own = &mut state.ranks[self.rank];
        own.messages[parity].clear();
        own.messages[parity].extend_from_slice(mine);
        own.sent = self.step;
        self.group.changed.notify_all();
        while state.ranks.iter().any(|r| r.sent < self.step) {
            if let Some(rank) = state.ranks.iter().position(|r| r.sent < self.step && r.left) {
                return Err(TransportError::PeerLeft { rank });
            }
            state = self.group.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        all.resize_with(state.ranks.len(), Vec::new);
        for (mine, theirs) in all.iter_mut().zip(&state.ranks) {
            mine.clone_from(&theirs.messages[parity]);
        }
        Ok(())
    }
}

impl Drop for Loopback {
    fn drop(&mut self) {
        self.group.lock().ranks[self.rank].left = true;
        self.group.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;
    use std::time::Duration;

    /// What rank `rank` sends at step `step`: contents and length tell both.
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
                        if (step * 13 + rank * 29) % 61 == 0 {
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
    fn a_panic_of_a_rank_releases_the_others() {
        let mut group = Loopback::group(2);
        let (panics, mut waits) = (group.remove(0), group.remove(0));
        let handle = thread::spawn(move || {
            let _transport = panics;
            // Silent: no message of the panic hook among the test's output.
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
