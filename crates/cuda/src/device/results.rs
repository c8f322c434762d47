//! Memory for the results of launches, poisoned to detect results that no kernel wrote.

use crate::abi::{DeviceAddress, Draw, status};
use crate::device::Queue;
use crate::error::CudaError;

/// Fills the first `count` draws with ones before a launch writes them.
pub(crate) fn poison(draws: DeviceAddress<Draw>, count: usize, queue: Queue<'_>) -> Result<(), CudaError> {
    queue.fill(draws, 0xff, count)
}

/// Checks that kernels wrote all results.
///
/// # Errors
/// [`CudaError::Corrupt`]: a result was not written.
pub(crate) fn written(draws: &[Draw]) -> Result<(), CudaError> {
    match draws.iter().all(|draw| draw.status <= status::UNDECIDED) {
        true => Ok(()),
        false => Err(CudaError::Corrupt { what: "a result was not written" }),
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
        assert_eq!(
            written(&[of(status::DRAWN), poisoned]),
            Err(CudaError::Corrupt { what: "a result was not written" })
        );
    }
}
