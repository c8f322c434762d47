//! The grouped and online variants over device memory (paper Alg. I.2 and I.3).
#![allow(unsafe_code)]

use crate::abi::{Call, Groups, Matrices, PARTIAL_BYTES, Selection, Summaries};
use crate::device::Device;
use crate::device_matrix::DeviceMatrix;
use crate::device_tiled::DeviceHead;
use crate::error::CudaError;
use crate::fused_hopper::MAX_ROWS;
use crate::fused_portable::{Epilogue, LoadedPortable, Portable};
use crate::scratch::Scratch;
use crate::select::{GroupRule, SelectKernel};
use cudarc::driver::{CudaSlice, CudaStream, DevicePtr};
use std::sync::Arc;

/// Groups are multiples of this many tokens.
const GROUP_UNIT: u32 = 64;

/// # Errors
/// [`CudaError::GroupSize`].
pub(crate) fn check_group(size: u32) -> Result<(), CudaError> {
    if size == 0 || !size.is_multiple_of(GROUP_UNIT) { Err(CudaError::GroupSize { size }) } else { Ok(()) }
}

/// The grouped and online variants over device memory: two launches a call, on the caller's stream. A call allocates
/// nothing and waits for nothing, so it can be captured into a graph. The first launch leaves of every row and group a
/// log-mass and an exact local sample, the second draws from them by a [`GroupRule`].
///
/// Groups lie on the absolute grid of multiples of their size, so they are the same in every shard. The products are those
/// of [`DeviceTiled`](crate::DeviceTiled)'s portable kernel.
///
/// A row takes 24 bytes of scratch for each group and for each block of the first launch: groups of 512 tokens of a
/// vocabulary of 151936 on 132 multiprocessors make less than 1 MiB per 100 rows. Smaller groups and larger vocabularies take more; see
/// [`DeviceGroups::scratch_bytes`].
///
/// Planned are the kernels for hidden states of the weight's type. Other types load one at their first launch, and compile
/// it when it is in no cache. Make one before a capture.
#[derive(Debug)]
pub struct DeviceGroups {
    head: DeviceHead,
    /// Dropped, and so waited for, before the keys.
    pass: GroupPass,
    /// The first invalid logit a row; all ones between calls.
    invalid: CudaSlice<u64>,
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
        let pass = GroupPass::new(&head, max_rows, group, rule, device)?;
        let stream = device.stream()?;
        let allocate = CudaError::driver("allocate scratch");
        let invalid = stream.clone_htod(&[u64::MAX; MAX_ROWS]).map_err(&allocate)?;
        stream.synchronize().map_err(&allocate)?;
        Ok(DeviceGroups { head, pass, invalid })
    }

    /// The device.
    pub fn device(&self) -> &Arc<Device> {
        &self.pass.device
    }

    /// Bytes of device memory that the plan holds besides the kernels.
    pub fn scratch_bytes(&self) -> usize {
        self.pass.partials.len() + self.invalid.len() * size_of::<u64>()
    }

    /// Every launch has run: see [`Scratch::settle`].
    pub(crate) fn settle(&mut self) {
        self.pass.settle();
    }

    /// Draws for `hidden [rows, hidden]`: enqueues two launches on `stream` and returns.
    ///
    /// `rows` is the device address of one [`abi::Row`](crate::abi::Row) a row, `draws` of room for one
    /// [`abi::Draw`](crate::abi::Draw) a row. `log_z`, where given, is of room for one float64 a row: the logarithm of the
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
        rows: u64,
        draws: u64,
        log_z: Option<u64>,
    ) -> Result<(), CudaError> {
        let invalid = self.invalid.device_ptr(self.invalid.stream()).0;
        let results = Results { rows, draws, log_z: log_z.unwrap_or(0), invalid, running: 0, begins: true, ends: true };
        // SAFETY: the same contract; the invalid keys are this value's and as the kernels leave them.
        unsafe { self.pass.launch(stream, &self.head, hidden, &results) }
    }
}

/// The device addresses of what a pass reads and writes a row, and which part of the head it is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Results {
    pub(crate) rows: u64,
    pub(crate) draws: u64,
    /// 0 = not wanted.
    pub(crate) log_z: u64,
    /// All ones before the first part.
    pub(crate) invalid: u64,
    /// Not used where one part is the whole head.
    pub(crate) running: u64,
    pub(crate) begins: bool,
    pub(crate) ends: bool,
}

/// The two launches over a head, or over a part of one that comes in parts, ascending.
#[derive(Debug)]
pub(crate) struct GroupPass {
    device: Arc<Device>,
    size: u32,
    rule: GroupRule,
    max_rows: usize,
    /// The most blocks of a launch.
    blocks: u32,
    select: SelectKernel,
    /// Those that were used or planned.
    portable: Vec<Arc<LoadedPortable>>,
    partials: Scratch,
}

impl GroupPass {
    /// Plans for heads like this one, with at most as many tokens, at any place.
    pub(crate) fn new(
        head: &DeviceHead,
        max_rows: usize,
        size: u32,
        rule: GroupRule,
        device: &Arc<Device>,
    ) -> Result<Self, CudaError> {
        check_group(size)?;
        head.check(max_rows, device)?;
        let operand = Portable::operand(head.weight.dtype, head.weight.dtype);
        let planned = Portable::up_to(max_rows, operand, Epilogue::Summary);
        let portable = planned.map(|instance| device.portable(instance)).collect::<Result<Vec<_>, _>>()?;
        let most = portable.iter().map(|kernel| kernel.blocks(head.weight.rows as u32)).max();
        let blocks = most.unwrap_or(device.multiprocessors());
        // One group more for a first token within a group.
        let slots = head.weight.rows.div_ceil(size as usize) + 1 + blocks as usize;
        // Not numbers: what is not written must not be read.
        let partials = Scratch::new(max_rows * slots * PARTIAL_BYTES, &[], device)?;
        let (device, select) = (device.clone(), SelectKernel::load(device)?);
        Ok(GroupPass { device, size, rule, max_rows, blocks, select, portable, partials })
    }

    /// Every launch has run: see [`Scratch::settle`].
    pub(crate) fn settle(&mut self) {
        self.partials.settle();
    }

    /// Enqueues both launches over `head`.
    ///
    /// # Safety
    /// * As [`DeviceTiled::new`](crate::DeviceTiled::new) for the head, and
    ///   [`DeviceTiled::launch`](crate::DeviceTiled::launch) for the rest.
    /// * The head has at most the tokens that were planned.
    /// * Parts come in ascending order and begin at multiples of the group's size, but for the first.
    pub(crate) unsafe fn launch(
        &mut self,
        stream: &CudaStream,
        head: &DeviceHead,
        hidden: &DeviceMatrix,
        results: &Results,
    ) -> Result<(), CudaError> {
        if !head.takes(hidden, self.max_rows)? {
            return Ok(());
        }
        let operand = Portable::operand(head.weight.dtype, hidden.dtype);
        let instance = Portable::for_rows(hidden.rows, operand, Epilogue::Summary);
        let kernel = match self.portable.iter().find(|kernel| kernel.portable == instance) {
            Some(kernel) => kernel,
            None => {
                self.portable.push(self.device.portable(instance)?);
                self.portable.last().expect("one was just added")
            }
        };
        let (tokens, first_token, row_count) = (head.weight.rows as u32, head.first_token, hidden.rows as u32);
        let groups = Groups { size: self.size, first_token, tokens, blocks: kernel.blocks(tokens).min(self.blocks) };
        let partials = self.partials.lend();
        let summaries = Summaries { partials, size: self.size, slots: groups.slots() };
        let call = Call {
            rows: results.rows,
            bias: head.bias.unwrap_or(0),
            best: 0,
            invalid: results.invalid,
            logits: 0,
            arrived: 0,
            draws: 0,
            head: head.transform(),
            row_count,
            hidden: hidden.cols as u32,
            first_token,
            tokens,
        };
        let selection = Selection {
            rows: results.rows,
            partials,
            running: results.running,
            invalid: results.invalid,
            draws: results.draws,
            log_z: results.log_z,
            groups,
            row_count,
            rule: self.rule as u32,
            begins: results.begins.into(),
            ends: results.ends.into(),
        };
        // SAFETY: head, inputs and results by this function's contract; the scratch is this value's, sized by `new` for the
        // most blocks; the instance is the one for these rows and types, and its epilogue takes Summaries.
        unsafe {
            kernel.launch(stream, &call, &Matrices::of(&head.weight, hidden, 16), &summaries, groups.blocks)?;
            self.select.launch(stream, &selection)
        }
    }
}
