//! The fused tiled variant over device memory (paper Alg. 1).
#![allow(unsafe_code)]

use crate::abi::{Call, LogitStore, Maps, Matrices, RowLists, TensorMap};
use crate::device::fused_hopper::{Extra, Loaded, MAX_ROWS, More, Tile};
use crate::device::fused_portable::{Epilogue, LoadedPortable, MAX_BLOCKS, Portable};
use crate::device::gpu::Device;
use crate::device::head::DeviceHead;
use crate::device::matrix::DeviceMatrix;
use crate::device::scratch::Scratch;
use crate::device::tensor_map;
use crate::error::CudaError;
use core::ops::Range;
use cudarc::driver::CudaStream;
use flash_sampling_core::DType;
use std::sync::Arc;

/// Which kernels draw. All give the same bits, but for types that tensor cores do not take, whose sums are rounded
/// otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum KernelChoice {
    /// The fastest that takes the GPU and the layout: the Hopper kernel, else the portable one.
    #[default]
    Fastest,
    /// The portable kernel: `mma.sync` and `cp.async`.
    Portable,
    /// The portable kernel, which reads every layout as if nothing were aligned. Slow; made for tests.
    PortableUnaligned,
}

/// The fused tiled variant over device memory: one launch a call, on the caller's stream. A call allocates nothing and
/// waits for nothing, so it can be captured into a graph; positions are read from device memory when the kernel runs.
///
/// Planned are the kernels for hidden states of the weight's type that lie as well aligned as the weight. Others, and
/// [`DeviceTiled::launch_storing`] on Hopper, take other kernels: the first such launch loads one, and compiles it when
/// it is in no cache. Make one before a capture.
#[derive(Debug)]
pub struct DeviceTiled {
    device: Arc<Device>,
    head: DeviceHead,
    choice: KernelChoice,
    /// Where the Hopper kernel takes the weight.
    hopper: Option<Hopper>,
    /// Those that were used or planned.
    portable: Vec<Arc<LoadedPortable>>,
    /// Ordered bits of the best winner a row, the first invalid logit a row, a counter, and a logit a block and row.
    scratch: Scratch,
    max_rows: usize,
}

/// The Hopper kernels, and the weight as they read it.
#[derive(Debug)]
struct Hopper {
    kernels: Vec<Arc<Loaded>>,
    /// Those with more, each when the first such launch comes.
    with_more: Vec<Arc<Loaded>>,
    weight: TensorMap,
    granule: TensorMap,
}

impl Hopper {
    fn new(weight: &DeviceMatrix, max_rows: usize, device: &Device) -> Result<Self, CudaError> {
        let tiles = Tile::up_to(max_rows, weight.dtype, Extra::Nothing);
        Ok(Hopper {
            kernels: tiles.map(|tile| device.kernel(tile)).collect::<Result<Vec<_>, _>>()?,
            with_more: Vec::new(),
            weight: tensor_map::encode(weight, 64)?,
            granule: tensor_map::encode(weight, 16)?,
        })
    }

    /// The kernel for a call of `rows` rows, within the plan.
    fn kernel(&mut self, rows: usize, more: &More, device: &Device) -> Result<&Loaded, CudaError> {
        let fits = |kernel: &&Arc<Loaded>| kernel.tile.columns as usize >= rows;
        let planned = self.kernels.iter().find(fits).expect("the planned tiles reach the planned rows");
        if matches!(more, More::Nothing) {
            return Ok(planned);
        }
        let tile = planned.tile.with(more);
        let at = match self.with_more.iter().position(|kernel| kernel.tile == tile) {
            Some(at) => at,
            None => {
                self.with_more.push(device.kernel(tile)?);
                self.with_more.len() - 1
            }
        };
        Ok(&self.with_more[at])
    }
}

const BEST: u64 = 0;
const INVALID: u64 = BEST + 8 * MAX_ROWS as u64;
const ARRIVED: u64 = INVALID + 8 * MAX_ROWS as u64;
const LOGITS: u64 = ARRIVED + 256;

impl DeviceTiled {
    /// Plans for calls of up to `max_rows` rows, 256 at most: compiles and loads the kernels, allocates the scratch.
    ///
    /// # Errors
    /// * [`CudaError::Architecture`]: the device is older than compute capability 8.0.
    /// * [`CudaError::Layout`]: the weight has no rows or no columns, a stride below its width, or an address within an element; or
    ///   the bias such an address.
    /// * [`CudaError::Head`]: a scale or soft-cap that is not finite and positive, or token ids above 2^32 - 2.
    /// * [`CudaError::TooLarge`]: tokens, columns or rows.
    /// * [`CudaError::EmptyPlan`]: `max_rows` is 0.
    /// * [`CudaError::Compile`], [`CudaError::Driver`].
    ///
    /// # Safety
    /// * The head's weight and bias are device memory of this device, of the stated sizes, and stay so and unchanged
    ///   while this value is used and until all its launches have run.
    /// * This value outlives its launches and every launch of a graph that captured them. Dropping it waits for the GPU when
    ///   launches may be pending, so it is not dropped while a stream of the context captures.
    pub unsafe fn new(head: DeviceHead, max_rows: usize, device: &Arc<Device>) -> Result<Self, CudaError> {
        // SAFETY: this function's contract is the same.
        unsafe { DeviceTiled::with_kernels(head, max_rows, device, KernelChoice::default()) }
    }

    /// [`DeviceTiled::new`] with a choice of kernels.
    ///
    /// # Errors
    /// As [`DeviceTiled::new`].
    ///
    /// # Safety
    /// As [`DeviceTiled::new`].
    pub unsafe fn with_kernels(
        head: DeviceHead,
        max_rows: usize,
        device: &Arc<Device>,
        choice: KernelChoice,
    ) -> Result<Self, CudaError> {
        let is_hopper = device.capability() == (9, 0) && choice == KernelChoice::Fastest && head.weight.is_aligned();
        // SAFETY: this function's contract is the same.
        let mut planned = unsafe { DeviceTiled::unplanned(head, max_rows, device, choice) }?;
        if is_hopper {
            planned.hopper = Some(Hopper::new(&head.weight, max_rows, device)?);
        } else {
            let operand = Portable::operand(head.weight.dtype, head.weight.dtype);
            for instance in Portable::up_to(max_rows, operand, Epilogue::Draw) {
                planned.portable.push(device.portable(instance)?);
            }
        }
        Ok(planned)
    }

    /// [`DeviceTiled::with_kernels`] for the portable kernels, which are loaded when they are used.
    ///
    /// # Safety
    /// As [`DeviceTiled::new`].
    pub(crate) unsafe fn unplanned(
        head: DeviceHead,
        max_rows: usize,
        device: &Arc<Device>,
        choice: KernelChoice,
    ) -> Result<Self, CudaError> {
        head.check(max_rows, device)?;
        let size = LOGITS as usize + 4 * MAX_BLOCKS * device.multiprocessors() as usize * max_rows;
        // Ones are what the invalid keys begin with, and NaN for the logits, which nobody reads before they are written.
        let zeros = [BEST as usize..INVALID as usize, ARRIVED as usize..LOGITS as usize];
        let scratch = Scratch::new(size, &zeros, device)?;
        let device = device.clone();
        let (hopper, portable) = (None, Vec::new());
        Ok(DeviceTiled { device, head, choice, hopper, portable, scratch, max_rows })
    }

    /// Goes on with another head like the planned one, of any number of tokens at any place of the vocabulary; of an
    /// [unplanned](DeviceTiled::unplanned) value alone.
    ///
    /// # Safety
    /// As [`DeviceTiled::new`] for the head, until it is moved on and the launches until then have run.
    pub(crate) unsafe fn move_to(&mut self, head: DeviceHead) {
        assert!(self.hopper.is_none(), "its maps are of the planned weight");
        self.head = head;
    }

    /// The device.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// The global ids of the tokens.
    pub(crate) fn tokens(&self) -> Range<u32> {
        self.head.first_token..self.head.first_token + self.head.weight.rows as u32
    }

    /// Bytes of device memory that the plan holds besides the kernels.
    pub fn scratch_bytes(&self) -> usize {
        self.scratch.len()
    }

    /// Every launch has run: see [`Scratch::settle`].
    pub(crate) fn settle(&mut self) {
        self.scratch.settle();
    }

    /// Draws for `hidden [rows, hidden]`: enqueues one launch on `stream` and returns. Tokens that cannot win are left out
    /// of it, so it cannot tell log Z; [`DeviceGroups`](crate::DeviceGroups) by [`GroupRule::Maxima`](crate::GroupRule::Maxima)
    /// gives the same draws with log Z, in two launches.
    ///
    /// `rows` is the device address of one [`abi::Row`](crate::abi::Row) a row, `draws` of room for one
    /// [`abi::Draw`](crate::abi::Draw) a row.
    ///
    /// # Errors
    /// * [`CudaError::Layout`]: the hidden states' width, stride or address.
    /// * [`CudaError::TooLarge`]: more rows than planned.
    /// * [`CudaError::Driver`], and [`CudaError::Compile`] where a kernel is needed that was not planned.
    ///
    /// # Safety
    /// * `hidden`, `rows`, `draws`, and what the rows point to, are device memory of this device, of the stated sizes,
    ///   until the launch has run.
    /// * The rows are as [`abi::Row`](crate::abi::Row) states, and none is [`PENALISED`](crate::abi::PENALISED).
    /// * Launches of one planned value follow each other: on one stream, or ordered by events.
    /// * This value outlives the launch, and every launch of a graph that captured it.
    pub unsafe fn launch(
        &mut self,
        stream: &CudaStream,
        hidden: &DeviceMatrix,
        rows: u64,
        draws: u64,
    ) -> Result<(), CudaError> {
        // SAFETY: the same contract.
        unsafe { self.launch_any(stream, hidden, rows, draws, More::Nothing) }.map(drop)
    }

    /// [`DeviceTiled::launch`] for rows of which some have penalties, or masks that forbid most tokens. On Hopper it is
    /// another kernel, which the first such launch loads.
    ///
    /// # Errors
    /// As [`DeviceTiled::launch`].
    ///
    /// # Safety
    /// As [`DeviceTiled::launch`], and rows may be [`PENALISED`](crate::abi::PENALISED).
    pub unsafe fn launch_with_knobs(
        &mut self,
        stream: &CudaStream,
        hidden: &DeviceMatrix,
        rows: u64,
        draws: u64,
    ) -> Result<(), CudaError> {
        // SAFETY: the same contract.
        unsafe { self.launch_any(stream, hidden, rows, draws, More::Knobs(LogitStore::default())) }.map(drop)
    }

    /// As [`DeviceTiled::launch_with_knobs`], and stores the logits of all rows by the fastest kernel, `row_stride` floats
    /// apart. Returns whether they are the transformed ones, and not the raw ones.
    ///
    /// # Errors
    /// As [`DeviceTiled::launch`].
    ///
    /// # Safety
    /// As [`DeviceTiled::launch_with_knobs`]; the logits too are device memory of this device until the launch has run.
    pub(crate) unsafe fn launch_storing_any(
        &mut self,
        stream: &CudaStream,
        hidden: &DeviceMatrix,
        rows: u64,
        draws: u64,
        stored: LogitStore,
    ) -> Result<bool, CudaError> {
        // SAFETY: the same contract.
        unsafe { self.launch_any(stream, hidden, rows, draws, More::Knobs(stored)) }
    }

    /// Whether calls with these hidden states can list the largest logits.
    pub(crate) fn lists(&self, hidden: &DeviceMatrix) -> bool {
        self.hopper.is_some() && self.is_alike(hidden) && hidden.is_aligned()
    }

    /// As [`DeviceTiled::launch_with_knobs`], but rows with filters leave their largest logits in `lists`, and a greedy
    /// draw where these tell all.
    ///
    /// # Errors
    /// As [`DeviceTiled::launch`].
    ///
    /// # Safety
    /// As [`DeviceTiled::launch_with_knobs`]; [`DeviceTiled::lists`] is true of the hidden states; the lists are device
    /// memory, as row_lists.cuh states, until the launch has run.
    pub(crate) unsafe fn launch_listing(
        &mut self,
        stream: &CudaStream,
        hidden: &DeviceMatrix,
        rows: u64,
        draws: u64,
        lists: RowLists,
    ) -> Result<(), CudaError> {
        // SAFETY: the same contract.
        unsafe { self.launch_any(stream, hidden, rows, draws, More::Lists(lists)) }.map(drop)
    }

    /// Returns whether it was the portable kernel.
    ///
    /// # Safety
    /// As [`DeviceTiled::launch`]; with knobs or lists rows may be [`PENALISED`](crate::abi::PENALISED). What `more` names
    /// is device memory too. Lists only where [`DeviceTiled::lists`].
    unsafe fn launch_any(
        &mut self,
        stream: &CudaStream,
        hidden: &DeviceMatrix,
        rows: u64,
        draws: u64,
        more: More,
    ) -> Result<bool, CudaError> {
        // A thread may have no current context, and the driver encodes maps by it.
        self.device.context().bind_to_thread().map_err(CudaError::driver("use the GPU on this thread"))?;
        if !self.head.takes(hidden, self.max_rows)? {
            return Ok(false);
        }
        let call = self.call(hidden, rows, draws);
        let takes = self.is_alike(hidden) && hidden.is_aligned();
        let Some(hopper) = self.hopper.as_mut().filter(|_| takes) else {
            let stored = if let More::Knobs(stored) = more { stored } else { LogitStore::default() };
            // SAFETY: the same contract.
            return unsafe { self.launch_portable(stream, hidden, &call, stored) }.map(|()| true);
        };
        let (weight, granule) = (hopper.weight, hopper.granule);
        let kernel = hopper.kernel(hidden.rows, &more, &self.device)?;
        let map = tensor_map::encode(hidden, kernel.tile.columns / kernel.tile.cluster)?;
        let maps = Maps { weight, granule, hidden: map };
        let blocks = kernel.blocks(call.tokens, self.device.multiprocessors());
        // SAFETY: head and inputs by this function's and `new`'s contract; the scratch is this value's, sized by `new`
        // for every multiprocessor, and the kernel leaves it as it found it.
        unsafe { kernel.launch(stream, blocks, &call, &maps, &more) }.map(|()| false)
    }

    /// Draws as [`DeviceTiled::launch`] does, and keeps the transformed logits (paper App. K), float32: that of row `r`
    /// and of the weight's row `t` at the device address `logits + 4 * (r * row_stride + t)`. An invalid logit is stored
    /// as -inf, and its row's draw says so. Always the portable kernel's work.
    ///
    /// # Errors
    /// As [`DeviceTiled::launch`]; [`CudaError::Layout`] also when the logits' address is not a multiple of 4 or
    /// `row_stride` is smaller than the weight's rows.
    ///
    /// # Safety
    /// As [`DeviceTiled::launch`]; the logits too are device memory of this device until the launch has run.
    pub unsafe fn launch_storing(
        &mut self,
        stream: &CudaStream,
        hidden: &DeviceMatrix,
        rows: u64,
        draws: u64,
        logits: u64,
        row_stride: usize,
    ) -> Result<(), CudaError> {
        let (cols, dtype) = (self.head.weight.rows, DType::F32);
        DeviceMatrix { address: logits, dtype, rows: hidden.rows, cols, row_stride }.check("logits")?;
        if !self.head.takes(hidden, self.max_rows)? {
            return Ok(());
        }
        let call = self.call(hidden, rows, draws);
        // SAFETY: the same contract.
        unsafe { self.launch_portable(stream, hidden, &call, LogitStore { logits, stride: row_stride as u64 }) }
    }

    fn is_alike(&self, hidden: &DeviceMatrix) -> bool {
        hidden.dtype == self.head.weight.dtype
    }

    fn call(&mut self, hidden: &DeviceMatrix, rows: u64, draws: u64) -> Call {
        let scratch = self.scratch.lend();
        Call {
            rows,
            bias: self.head.bias.unwrap_or(0),
            best: scratch + BEST,
            invalid: scratch + INVALID,
            logits: scratch + LOGITS,
            arrived: scratch + ARRIVED,
            draws,
            head: self.head.transform(),
            row_count: hidden.rows as u32,
            hidden: hidden.cols as u32,
            first_token: self.head.first_token,
            tokens: self.head.weight.rows as u32,
        }
    }

    /// # Safety
    /// As [`DeviceTiled::launch_storing`]; the logits may be null.
    unsafe fn launch_portable(
        &mut self,
        stream: &CudaStream,
        hidden: &DeviceMatrix,
        call: &Call,
        stored: LogitStore,
    ) -> Result<(), CudaError> {
        let weight = &self.head.weight;
        let instance = Portable::for_rows(hidden.rows, Portable::operand(weight.dtype, hidden.dtype), Epilogue::Draw);
        // The smallest unit that an element of 16 bits allows.
        let largest = if self.choice == KernelChoice::PortableUnaligned { 2 } else { 16 };
        let matrices = Matrices::of(weight, hidden, largest);
        let kernel = match self.portable.iter().find(|kernel| kernel.portable == instance) {
            Some(kernel) => kernel,
            None => {
                self.portable.push(self.device.portable(instance)?);
                self.portable.last().expect("one was just added")
            }
        };
        // SAFETY: head and inputs by the caller's and `new`'s contract; the scratch is this value's, sized by `new` for the
        // most blocks, and the kernel leaves it as it found it; the instance is the one for these rows and types.
        unsafe { kernel.launch(stream, call, &matrices, &stored, kernel.blocks(call.tokens)) }
    }
}
