//! A list that workers share: the largest logits of a row so far, for rows with filters that draw by upper bounds.
//!
//! Each worker also has a list of its own part of the vocabulary. Each token of a list needs a logit from the weight.
//! With 16 workers and no shared list, the lists of a row would have 16 times as many tokens as necessary.

use crate::scan::mass_cutoff::{of_ordered, ordered};
use crate::scan::top_k_buffer::TopKBuffer;
use core::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};

/// The tokens with the largest logits of a row so far. Workers skip tokens with a logit below the last of these.
#[derive(Debug)]
pub(crate) struct SharedList {
    /// The length of the list; 0 if workers do not share it.
    limit: AtomicUsize,
    /// The logit of the last token if the list is full, else -inf; as ordered bits.
    floor: AtomicU32,
    /// Boxed, so that the bounds of a row have 64 bytes.
    tokens: Box<Mutex<TopKBuffer>>,
    /// The bits of a number that negative controls add to the floor.
    #[cfg(test)]
    pub(crate) error: AtomicU32,
}

/// A shared list that this worker fills.
pub(crate) struct OpenList<'a> {
    tokens: MutexGuard<'a, TopKBuffer>,
    floor: &'a AtomicU32,
}

impl SharedList {
    pub(crate) fn new() -> Self {
        let floor = AtomicU32::new(ordered(f32::NEG_INFINITY));
        SharedList {
            limit: AtomicUsize::new(0),
            floor,
            tokens: Box::default(),
            #[cfg(test)]
            error: AtomicU32::new(0),
        }
    }

    /// Empties the list before a pass. With a `limit` of 0, workers do not share the list.
    pub(crate) fn begin(&self, limit: usize) {
        self.limit.store(limit, Ordering::Relaxed);
        self.floor.store(ordered(f32::NEG_INFINITY), Ordering::Relaxed);
        if limit > 0
            && let Ok(mut tokens) = self.tokens.lock()
        {
            tokens.begin(limit, limit);
        }
    }

    /// Returns the logit below which no token is among the largest logits; -inf if none is known.
    #[inline(always)]
    pub(crate) fn floor(&self) -> f32 {
        let floor = of_ordered(self.floor.load(Ordering::Relaxed));
        #[cfg(test)]
        let floor = floor + f32::from_bits(self.error.load(Ordering::Relaxed));
        floor
    }

    /// Opens the list, if workers share it and no other worker has it open. Without the tokens of a worker that cannot
    /// open the list, the floor is lower, and still valid.
    #[inline(always)]
    pub(crate) fn open(&self) -> Option<OpenList<'_>> {
        if self.limit.load(Ordering::Relaxed) == 0 {
            return None;
        }
        self.tokens.try_lock().ok().map(|tokens| OpenList { tokens, floor: &self.floor })
    }
}

impl OpenList<'_> {
    /// Adds a token by its logit. Each token may be added once: the floor counts tokens.
    #[inline(always)]
    pub(crate) fn push(&mut self, logit: f32, token: u32) {
        self.tokens.push(logit, token);
    }
}

impl Drop for OpenList<'_> {
    fn drop(&mut self) {
        self.tokens.pick();
        if let Some(floor) = self.tokens.last_logit() {
            self.floor.store(ordered(floor), Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_floor_is_the_last_of_the_first_tokens_so_far(
            parts in prop::collection::vec(prop::collection::vec(-9i8..10, 0..40), 1..9), limit in 1usize..50, raised in 1f32..9.0,
        ) {
            let (list, from_bounds) = (SharedList::new(), SharedList::new());
            list.begin(limit);
            from_bounds.begin(limit);
            let mut sorted = Vec::new();
            for (token, logit) in (0..).zip(parts.concat().into_iter().map(f32::from)) {
                list.open().unwrap().push(logit, token);
                from_bounds.open().unwrap().push(logit + raised, token);
                sorted.push(logit);
                sorted.sort_by(|a, b| b.total_cmp(a));
                let last = sorted.get(limit - 1).copied();
                prop_assert_eq!(list.floor(), last.unwrap_or(f32::NEG_INFINITY));
                // The negative control: upper bounds in the list make the floor too high.
                prop_assert!(last.is_none_or(|last| from_bounds.floor() > last));
            }
        }
    }

    #[test]
    fn a_list_takes_tokens_of_one_worker_at_a_time_and_none_without_a_limit() {
        let list = SharedList::new();
        assert!(list.open().is_none());
        list.begin(2);
        let mut open = list.open().unwrap();
        assert!(list.open().is_none());
        (0..2).for_each(|token| open.push(3.0, token));
        drop(open);
        assert_eq!(list.floor(), 3.0);
        list.begin(2);
        assert_eq!(list.floor(), f32::NEG_INFINITY);
        list.begin(0);
        assert!(list.open().is_none());
    }
}
