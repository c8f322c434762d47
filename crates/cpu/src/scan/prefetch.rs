//! Memory that will be needed soon.
//!
//! A tile's weights push the states of the rows out of the second-level cache, so that each row waits for its own. With
//! 64 rows on 16 cores they are fetched while the rows before them are at work.

/// Fetches the lines of a slice into the cache.
#[inline(always)]
pub(crate) fn prefetch<T>(slice: &[T]) {
    #[cfg(target_arch = "x86_64")]
    {
        let bytes = slice.as_ptr_range();
        let (mut at, end) = (bytes.start.cast::<i8>(), bytes.end.cast::<i8>());
        while at < end {
            // SAFETY: a prefetch reads nothing that the program sees and never faults; SSE is part of x86-64.
            unsafe { core::arch::x86_64::_mm_prefetch::<{ core::arch::x86_64::_MM_HINT_T0 }>(at) };
            at = at.wrapping_add(64);
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = slice;
}
