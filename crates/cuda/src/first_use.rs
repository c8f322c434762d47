//! Kernels and memory that are created by the first call that needs them.

use crate::error::CudaError;

/// Returns the value of `slot`. If `slot` is empty, first fills it with the result of `make`.
pub(crate) fn get_or_make<T>(
    slot: &mut Option<T>,
    make: impl FnOnce() -> Result<T, CudaError>,
) -> Result<&mut T, CudaError> {
    match slot {
        Some(value) => Ok(value),
        none => Ok(none.insert(make()?)),
    }
}
