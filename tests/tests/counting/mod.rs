//! A counting allocator and rows for tests of memory. The counts cover the whole process, so a test file with this
//! module has only one test.
#![allow(dead_code)] // each test file uses its part

use flash_sampling_core::{Capabilities, History, Knob, LogprobsMode, RowParams};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// The system's allocator with counters.
pub(crate) struct Counting;

static CALLS: AtomicUsize = AtomicUsize::new(0);
static HELD: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

fn grown(bytes: usize) {
    CALLS.fetch_add(1, Relaxed);
    PEAK.fetch_max(HELD.fetch_add(bytes, Relaxed) + bytes, Relaxed);
}

// SAFETY: every method passes its arguments to the system's allocator, which meets the contract of the trait.
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

/// The allocations of a function call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Counted {
    /// The number of allocations.
    pub(crate) calls: usize,
    /// The largest number of allocated bytes, less the bytes allocated before the call.
    pub(crate) peak: usize,
}

/// Runs `work`, and counts the allocations of all threads of the process.
pub(crate) fn counted<R>(work: impl FnOnce() -> R) -> (R, Counted) {
    let (calls, held) = (CALLS.load(Relaxed), HELD.load(Relaxed));
    PEAK.store(held, Relaxed);
    let result = work();
    (result, Counted { calls: CALLS.load(Relaxed) - calls, peak: PEAK.load(Relaxed) - held })
}

/// Returns rows with different knobs in a cycle of 14. A row with an unsupported knob becomes a plain row.
pub(crate) fn rows<'a>(count: usize, can: &Capabilities, history: &'a History, seed: u64) -> Vec<RowParams<'a>> {
    const MASK: [u32; 60] = [0xfeed_beef; 60];
    let mut plain = 0;
    let rows = (0..count as u64)
        .map(|r| {
            let row = RowParams { seed, position: r, ..RowParams::default() };
            let list = Some(5);
            let asked = match r % 14 {
                0 => RowParams { logprobs: Some(5), ..row },
                1 => RowParams { temperature: 0.0, ..row },
                2 => RowParams { draws: 8, without_replacement: can.without_replacement, temperature: 0.8, ..row },
                3 => RowParams { logit_bias: &[(3, 1.0)], ..row },
                4 => RowParams { min_p: 0.05, ..row },
                5 => RowParams { top_k: 20, ..row },
                6 => RowParams { top_p: 0.95, draws: 3, ..row },
                7 => RowParams { top_p: 0.8, kept: true, ..row },
                8 => RowParams { typical_p: 0.5, logprobs: list, ..row },
                9 => RowParams { repetition_penalty: 1.2, dry_multiplier: 0.5, history: Some(history), ..row },
                10 => RowParams { logprobs: list, logprobs_mode: LogprobsMode::Raw, ..row },
                11 => RowParams { mask: Some(&MASK), draws: 3, ..row },
                12 => RowParams { top_k: 50, top_p: 0.9, mask: Some(&MASK), ..row },
                _ => RowParams { top_n_sigma: 2.0, xtc_probability: 0.5, xtc_threshold: 0.01, ..row },
            };
            let is_taken = asked.enabled().without(can.knobs).is_empty();
            plain += usize::from(!is_taken);
            if is_taken { asked } else { row }
        })
        .collect();
    // Eight of the 14 rows have a knob that some samplers lack. Another test compares docs/knobs.md with the samplers.
    let lacks = |knob| !can.knobs.contains(knob);
    let filters = if lacks(Knob::TopK) { count as u64 } else { 0 };
    let of_filters = (0..filters).filter(|r| matches!(r % 14, 4..=8 | 12 | 13)).count();
    let of_raw = (0..count).filter(|r| r % 14 == 10 && lacks(Knob::LogprobsMode)).count();
    assert_eq!(plain, of_filters + of_raw, "rows that lost their knob");
    rows
}
