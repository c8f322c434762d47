//! An allocator that counts, for the tests of memory. A test file with it holds one test: the count is the process's.
#![allow(dead_code)] // each test file uses its part

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// The system's allocator, counted.
pub(crate) struct Counting;

static CALLS: AtomicUsize = AtomicUsize::new(0);
static HELD: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

fn grown(bytes: usize) {
    CALLS.fetch_add(1, Relaxed);
    PEAK.fetch_max(HELD.fetch_add(bytes, Relaxed) + bytes, Relaxed);
}

// SAFETY: every method hands its arguments to the system's allocator, whose contract is the trait's.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        grown(layout.size());
        // SAFETY: the caller keeps the contract of `GlobalAlloc::alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        grown(layout.size());
        // SAFETY: the caller keeps the contract of `GlobalAlloc::alloc_zeroed`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller keeps the contract of `GlobalAlloc::dealloc`.
        unsafe { System.dealloc(ptr, layout) }
    }
}

/// What a piece of work allocated.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Counted {
    /// Calls of the allocator.
    pub(crate) calls: usize,
    /// The largest number of bytes held at once, beyond those held before.
    pub(crate) peak: usize,
}

/// Runs `work` and counts, over all threads of the process.
pub(crate) fn counted<R>(work: impl FnOnce() -> R) -> (R, Counted) {
    let (calls, held) = (CALLS.load(Relaxed), HELD.load(Relaxed));
    PEAK.store(held, Relaxed);
    let result = work();
    (result, Counted { calls: CALLS.load(Relaxed) - calls, peak: PEAK.load(Relaxed) - held })
}
