//! The grouped and online variants over device memory (paper Alg. I.2 and I.3).
#![allow(unsafe_code)]

use crate::abi::{DeviceAddress, Draw, Row};
use crate::device::fused_hopper::MAX_ROWS;
use crate::device::gpu::Device;
use crate::device::group_pass::{GroupPass, Results};
use crate::device::head::DeviceHead;
use crate::device::launch::Queue;
use crate::device::matrix::DeviceMatrix;
use crate::device::scratch::Scratch;
use crate::device::select::GroupRule;
use crate::device::tiled::RowsAndDraws;
use crate::error::CudaError;
use cudarc::driver::CudaStream;
use std::sync::Arc;

/// The grouped and online variants over device memory: two launches a call, on the caller's stream. A call allocates
/// nothing and waits for nothing, so it can be captured into a graph. The first launch leaves of every row and group a
/// log-mass and an exact local sample, the second draws from them by a [`GroupRule`].
///
/// Groups lie on the absolute grid of multiples of their size, so they are the same in every shard. The products are those
/// of [`DeviceTiled`](crate::DeviceTiled)'s portable kernel.
///
/// A row takes 24 bytes of scratch for each group and for each block of the first launch: groups of 512 tokens of a
/// vocabulary of 151936 on 132 multiprocessors make less than 1 MiB per 100 rows, and larger vocabularies need larger groups:
/// [`group_size`](flash_sampling_core::backend::group_size) has them. Smaller groups take more; see [`DeviceGroups::scratch_bytes`].
///
/// Planned are the kernels for hidden states of the weight's type. Other types load one at their first launch, and compile
/// it when it is in no cache. Make one before a capture.
#[derive(Debug)]
pub struct DeviceGroups {
    head: DeviceHead,
    pass: GroupPass,
    /// The first invalid logit a row; all ones between calls.
    invalid: Scratch,
}

impl DeviceGroups {
    /// Plans for calls of up to `max_rows` rows, 256 at most, with groups of `group` tokens: compiles and loads the
    /// kernels, allocates the scratch.
    ///
    /// # Errors
    /// * [`CudaError::GroupSize`]: `group` is not a positive multiple of 64.
    /// * Those of [`DeviceTiled::new`](crate::DeviceTiled::new).
    ///
    /// # Safety
    /// As [`DeviceTiled::new`](crate::DeviceTiled::new).
    pub unsafe fn new(
        head: DeviceHead,
        max_rows: usize,
        group: u32,
        rule: GroupRule,
        device: &Arc<Device>,
    ) -> Result<Self, CudaError> {
        DeviceGroups::plan(head, max_rows, group, rule, device)
    }

    /// [`DeviceGroups::new`]. Reads no device memory: whoever makes the [`Queue`] of a launch answers for the head.
    pub(crate) fn plan(
        head: DeviceHead,
        max_rows: usize,
        group: u32,
        rule: GroupRule,
        device: &Arc<Device>,
    ) -> Result<Self, CudaError> {
        let pass = GroupPass::new(&head, max_rows, group, rule, device)?;
        let invalid = Scratch::new(MAX_ROWS * size_of::<u64>(), &[], device)?;
        Ok(DeviceGroups { head, pass, invalid })
    }

    /// The device.
    pub fn device(&self) -> &Arc<Device> {
        self.pass.device()
    }

    /// Bytes of device memory that the plan holds besides the kernels.
    pub fn scratch_bytes(&self) -> usize {
        self.pass.scratch_bytes() + self.invalid.len()
    }

    /// Every launch has run: see [`Scratch::mark_idle`].
    pub(crate) fn mark_idle(&mut self) {
        self.pass.mark_idle();
        self.invalid.mark_idle();
    }

    /// Draws for `hidden [rows, hidden]`: enqueues two launches on `stream` and returns.
    ///
    /// `rows` has one [`abi::Row`](crate::abi::Row) a row, `draws` room for one
    /// [`abi::Draw`](crate::abi::Draw) a row. `log_z`, where given, has room for one float64 a row: the logarithm of the
    /// row's mass, `ln sum e^l` over the transformed logits, within 1e-8 (paper App. L); the log-probability of the drawn
    /// token is its logit less that.
    ///
    /// # Errors
    /// As [`DeviceTiled::launch`](crate::DeviceTiled::launch).
    ///
    /// # Safety
    /// As [`DeviceTiled::launch`](crate::DeviceTiled::launch), for `log_z` too.
    pub unsafe fn launch(
        &mut self,
        stream: &CudaStream,
        hidden: &DeviceMatrix,
        rows: DeviceAddress<Row>,
        draws: DeviceAddress<Draw>,
        log_z: Option<DeviceAddress<f64>>,
    ) -> Result<(), CudaError> {
        // SAFETY: the bullets of this function and of `new`; the scratch is this value's.
        let queue = unsafe { Queue::new(stream) };
        self.enqueue(queue, hidden, (rows, draws), log_z.unwrap_or_default())
    }

    /// [`DeviceGroups::launch`]; log Z may be null.
    pub(crate) fn enqueue(
        &mut self,
        queue: Queue<'_>,
        hidden: &DeviceMatrix,
        (rows, draws): RowsAndDraws,
        log_z: DeviceAddress<f64>,
    ) -> Result<(), CudaError> {
        let (invalid, running) = (self.invalid.begin_use(), DeviceAddress::NULL);
        let results = Results { rows, draws, log_z, invalid, running, begins: true, ends: true };
        self.pass.launch(queue, &self.head, hidden, &results)
    }
}
