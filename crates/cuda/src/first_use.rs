//! Kernels and memory that the first call with a need for them makes.

use crate::error::CudaError;

/// Returns the value of a slot, and makes it at first use.
pub(crate) fn get_or_make<T>(
    slot: &mut Option<T>,
    make: impl FnOnce() -> Result<T, CudaError>,
) -> Result<&mut T, CudaError> {
    match slot {
        Some(value) => Ok(value),
        none => Ok(none.insert(make()?)),
    }
}
