//! The grouped and online variants over device memory (paper Alg. I.2 and I.3).

use crate::abi::DeviceAddress;
use crate::device::group_pass::{GroupPass, Results};
use crate::device::{Device, DeviceHead, DeviceMatrix, GroupRule, MAX_ROWS, Queue, RowsAndDraws, Scratch};
use crate::error::CudaError;
use std::sync::Arc;

/// The grouped and online variants over device memory: two launches per call.
///
/// A call allocates nothing and does not wait. The first launch computes a log-mass and an exact local sample for every
/// row and group. The second launch draws from these by a [`GroupRule`].
///
/// Groups begin at absolute multiples of their size, so all shards have the same groups. The products equal those of
/// the portable kernel of [`DeviceTiled`](crate::DeviceTiled).
///
/// A row uses 24 bytes of scratch for each group and for each block of the first launch. For 151936 tokens in groups of
/// 512 on 132 multiprocessors, this is less than 1 MiB per 100 rows.
///
/// The plan has the kernels for hidden states of the weight's type. The first launch with another type loads a kernel,
/// and compiles it if no cache has it.
#[derive(Debug)]
pub(crate) struct DeviceGroups {
    head: DeviceHead,
    pass: GroupPass,
    /// The first invalid logit per row; all ones between calls.
    invalid: Scratch,
}

impl DeviceGroups {
    /// Plans calls of up to `max_rows` rows, at most 256, with groups of `group` tokens: compiles and loads the
    /// kernels, and allocates the scratch. Reads no device memory: the creator of a launch's [`Queue`] guarantees the
    /// head's safety.
    ///
    /// # Errors
    /// * [`CudaError::GroupSize`]: `group` is not a positive multiple of 64.
    /// * Those of [`DeviceTiled::new`](crate::DeviceTiled::new).
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

    /// Records that every launch has run: see [`Scratch::mark_idle`].
    pub(crate) fn mark_idle(&mut self) {
        self.pass.mark_idle();
        self.invalid.mark_idle();
    }

    /// Enqueues the two launches for `hidden [rows, hidden]`.
    ///
    /// `log_z`, if not null, has room for one float64 per row: the logarithm of the row's mass, `ln sum e^l` over the
    /// transformed logits, within 1e-8 (paper App. L). The log-probability of the drawn token is its logit minus log Z.
    ///
    /// # Errors
    /// As [`DeviceTiled::launch`](crate::DeviceTiled::launch), for `log_z` too.
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
