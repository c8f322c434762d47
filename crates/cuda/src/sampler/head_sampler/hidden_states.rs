//! The hidden states of a call.

use crate::device::DeviceMatrix;
use crate::error::CudaError;
use crate::sampler::DeviceHidden;
use core::ops::Range;
use flash_sampling_core::Matrix;

/// The hidden states of a call: on the host, or on the device.
#[derive(Clone, Copy, Debug)]
pub(super) enum HiddenStates<'c> {
    Host(&'c Matrix<'c>),
    Device(DeviceMatrix),
}

impl<'c> HiddenStates<'c> {
    /// The hidden states of a call: the input, or hidden states on the device of the same shape and type.
    pub(super) fn of(input: &'c Matrix<'c>, hidden: Option<&DeviceHidden>) -> Result<Self, CudaError> {
        let Some(hidden) = hidden.map(DeviceHidden::matrix) else { return Ok(HiddenStates::Host(input)) };
        match (hidden.rows, hidden.cols, hidden.dtype) == (input.rows(), input.cols(), input.dtype()) {
            true => Ok(HiddenStates::Device(hidden)),
            false => Err(CudaError::Layout { what: "hidden states", reason: "the input has another shape or type" }),
        }
    }

    /// The hidden states of neighbouring rows. On the host, a launch copies the rows that it needs.
    pub(super) fn rows(self, rows: Range<usize>) -> Self {
        match self {
            HiddenStates::Device(hidden) => HiddenStates::Device(hidden.rows(rows)),
            host => host,
        }
    }
}
