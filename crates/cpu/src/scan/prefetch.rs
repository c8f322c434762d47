//! Prefetches memory.
//!
//! A tile's weights evict the states of the rows from the second-level cache, so each row would wait for its state. The
//! state of a row is prefetched during the work on earlier rows.

/// Prefetches the cache lines of a slice.
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
