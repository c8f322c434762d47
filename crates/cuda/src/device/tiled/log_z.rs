//! Draws with log Z, and their kernels and scratch, made at the first such call.

use super::{DeviceTiled, RowsAndDraws};
use crate::abi::{DeviceAddress, Masses};
use crate::device::{
    Device, DeviceGroups, DeviceHead, DeviceMatrix, FusedOutput, GroupRule, Queue, RowFeatures, Scratch, check_aligned,
};
use crate::error::CudaError;
use crate::first_use::get_or_make;
use flash_sampling_core::backend::group_size;
use std::sync::Arc;

/// Bytes of a block's mass per row.
const PART_BYTES: usize = 8;

/// Scratch for the masses of the Hopper kernel's blocks, and the groups for unsupported calls of that kernel.
#[derive(Debug, Default)]
pub(super) struct LogZ {
    parts: Option<Scratch>,
    groups: Option<DeviceGroups>,
}

impl LogZ {
    /// The addresses of masses and log Z for a launch of the Hopper kernel.
    pub(super) fn masses(
        &mut self,
        log_z: DeviceAddress<f64>,
        rows: usize,
        device: &Arc<Device>,
    ) -> Result<Masses, CudaError> {
        let blocks = device.multiprocessors() as usize;
        let parts = get_or_make(&mut self.parts, || Scratch::new(blocks * rows * PART_BYTES, &[], device))?;
        Ok(Masses { parts: parts.begin_use(), log_z })
    }

    /// The groups, with the same draws as the tiled kernel.
    pub(super) fn groups(
        &mut self,
        head: &DeviceHead,
        rows: usize,
        device: &Arc<Device>,
    ) -> Result<&mut DeviceGroups, CudaError> {
        let size = group_size(head.weight.rows);
        get_or_make(&mut self.groups, || DeviceGroups::plan(*head, rows, size, GroupRule::Maxima, device))
    }

    /// Records that every launch has run: see [`Scratch::mark_idle`].
    pub(super) fn mark_idle(&mut self) {
        self.parts.iter_mut().for_each(Scratch::mark_idle);
        self.groups.iter_mut().for_each(DeviceGroups::mark_idle);
    }
}

impl DeviceTiled {
    /// [`DeviceTiled::launch_with_log_z`].
    pub(super) fn enqueue_with_log_z(
        &mut self,
        queue: Queue<'_>,
        hidden: &DeviceMatrix,
        rows: RowsAndDraws,
        log_z: DeviceAddress<f64>,
        features: RowFeatures,
    ) -> Result<(), CudaError> {
        check_aligned("log Z", log_z)?;
        // So that log Z does not depend on the number of rows.
        let is_for_all = self.hopper.as_ref().is_some_and(|hopper| hopper.max_rows() >= self.max_rows);
        if features == RowFeatures::Bare && self.head.soft_cap.is_none() && is_for_all && self.is_hopper(hidden) {
            let masses = self.log_z.masses(log_z, self.max_rows, &self.device)?;
            return self.launch_any(queue, hidden, rows, FusedOutput::LogZ(masses)).map(drop);
        }
        let groups = self.log_z.groups(&self.head, self.max_rows, &self.device)?;
        groups.enqueue(queue, hidden, rows, log_z)
    }
}
