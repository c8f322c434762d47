//! Room for the results of launches, poisoned so that a result that no kernel wrote is seen.
#![allow(unsafe_code)]

use crate::abi::{Draw, status};
use crate::error::CudaError;
use cudarc::driver::{CudaSlice, CudaStream, DevicePtr, result};
use std::sync::Arc;

/// Fills the first `count` draws with ones before a launch writes them.
pub(crate) fn poison(draws: &CudaSlice<u8>, count: usize, stream: &Arc<CudaStream>) -> Result<(), CudaError> {
    let bytes = (count * size_of::<Draw>()).min(draws.len());
    let address = draws.device_ptr(stream).0;
    // SAFETY: these are the memory's own bytes; the stream orders this before the launches.
    unsafe { result::memset_d8_async(address, 0xff, bytes, stream.cu_stream()) }
        .map_err(CudaError::driver("poison the draws"))
}

/// # Errors
/// [`CudaError::Corrupt`]: a result was not written.
pub(crate) fn written(draws: &[Draw]) -> Result<(), CudaError> {
    match draws.iter().all(|draw| draw.status <= status::UNDECIDED) {
        true => Ok(()),
        false => Err(CudaError::Corrupt { what: "a result" }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_that_no_kernel_wrote_are_seen() {
        let of = |status| Draw { status, ..Draw::default() };
        let poisoned: Draw = bytemuck::cast([0xffu8; size_of::<Draw>()]);
        assert_eq!(written(&[of(status::DRAWN), of(status::NAN), of(status::UNDECIDED)]), Ok(()));
        assert_eq!(written(&[of(status::DRAWN), poisoned]), Err(CudaError::Corrupt { what: "a result" }));
    }
}
