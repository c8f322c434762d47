//! Draws that tell log Z too, and what they need, made when the first call asks for it.
#![allow(unsafe_code)]

use super::DeviceTiled;
use crate::abi::Masses;
use crate::device::alignment::check_by_8;
use crate::device::fused_hopper::FusedOutput;
use crate::device::gpu::Device;
use crate::device::groups::DeviceGroups;
use crate::device::head::DeviceHead;
use crate::device::matrix::DeviceMatrix;
use crate::device::row_features::RowFeatures;
use crate::device::scratch::Scratch;
use crate::device::select::GroupRule;
use crate::error::CudaError;
use cudarc::driver::CudaStream;
use flash_sampling_core::group_size;
use std::sync::Arc;

/// Bytes of a block's mass of a row.
const PART_BYTES: usize = 8;

/// Room for the masses of the Hopper kernel's blocks, and the groups for what that kernel does not take.
#[derive(Debug, Default)]
pub(super) struct LogZ {
    parts: Option<Scratch>,
    groups: Option<DeviceGroups>,
}

impl LogZ {
    /// Where a launch of the Hopper kernel leaves masses and log Z.
    pub(super) fn masses(&mut self, log_z: u64, rows: usize, device: &Arc<Device>) -> Result<Masses, CudaError> {
        if self.parts.is_none() {
            let blocks = device.multiprocessors() as usize;
            self.parts = Some(Scratch::new(blocks * rows * PART_BYTES, &[], device)?);
        }
        Ok(Masses { parts: self.parts.as_mut().expect("it was just made").lend(), log_z })
    }

    /// The groups that draw as the tiled kernel does.
    ///
    /// # Safety
    /// As [`DeviceTiled::new`] for the head.
    pub(super) unsafe fn groups(
        &mut self,
        head: &DeviceHead,
        rows: usize,
        device: &Arc<Device>,
    ) -> Result<&mut DeviceGroups, CudaError> {
        if self.groups.is_none() {
            let size = group_size(head.weight.rows);
            // SAFETY: this function's contract.
            self.groups = Some(unsafe { DeviceGroups::new(*head, rows, size, GroupRule::Maxima, device) }?);
        }
        Ok(self.groups.as_mut().expect("they were just made"))
    }

    /// Bytes of device memory.
    pub(super) fn scratch_bytes(&self) -> usize {
        self.parts.as_ref().map_or(0, Scratch::len) + self.groups.as_ref().map_or(0, DeviceGroups::scratch_bytes)
    }

    /// Every launch has run: see [`Scratch::settle`].
    pub(super) fn settle(&mut self) {
        self.parts.iter_mut().for_each(Scratch::settle);
        self.groups.iter_mut().for_each(DeviceGroups::settle);
    }
}

impl DeviceTiled {
    /// Draws as [`DeviceTiled::launch`] does, and tells log Z (paper App. L): `log_z` is the device address of room for one
    /// float64 a row, the logarithm of the row's mass, `ln sum e^l` over the transformed logits. The log-probability of
    /// the drawn token is its logit less that; of a row whose draw is an error it is not to be read.
    ///
    /// Rows that are [bare](RowFeatures::Bare), of a head without soft-cap, take one launch where the Hopper kernel serves them,
    /// and log Z is within 2e-6; if such a row has a mask or biases after all, NaN. Others take the two launches of
    /// [`DeviceGroups`](crate::DeviceGroups) by [`GroupRule::Maxima`](crate::GroupRule::Maxima), and log Z is within 1e-8. The first
    /// call of either kind loads kernels and allocates scratch: make one before a capture.
    ///
    /// # Errors
    /// As [`DeviceTiled::launch`]; [`CudaError::Layout`] also where `log_z` is not a multiple of 8.
    ///
    /// # Safety
    /// As [`DeviceTiled::launch`], for `log_z` too.
    pub unsafe fn launch_with_log_z(
        &mut self,
        stream: &CudaStream,
        hidden: &DeviceMatrix,
        rows: u64,
        draws: u64,
        log_z: u64,
        kinds: RowFeatures,
    ) -> Result<(), CudaError> {
        check_by_8("log Z", log_z)?;
        if kinds == RowFeatures::Bare && self.head.soft_cap.is_none() && self.is_hoppers(hidden) {
            let masses = self.log_z.masses(log_z, self.max_rows, &self.device)?;
            // SAFETY: the same contract; there is room for the masses of as many blocks as there are multiprocessors.
            return unsafe { self.launch_any(stream, hidden, rows, draws, FusedOutput::LogZ(masses)) }.map(drop);
        }
        // SAFETY: the head is the one of `new`, whose contract it is.
        let groups = unsafe { self.log_z.groups(&self.head, self.max_rows, &self.device) }?;
        // SAFETY: the same contract.
        unsafe { groups.launch(stream, hidden, rows, draws, Some(log_z)) }
    }
}
