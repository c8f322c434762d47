//! The launches that draw from a shadow of the weight: digits, candidates, and exact winners. The full kernel
//! follows, and draws again if the shadow does not decide a row. In calls with filters, the third launch writes exact
//! lists, and `filter_list` follows; these calls need the Hopper kernel.

use crate::abi::{
    self, CANDIDATE_ROOM, Call, Candidates, DeviceAddress, EstimateCounts, FilterListCall, HiddenBound, MAX_PARTS,
    Maps, Matrices, PartWinner, ShadowCall, ShadowWords, TensorMap, WeightScales,
};
use crate::compile::{Instance, KernelSource, kernels};
use crate::device::fused_hopper::{FusedVariant, Loaded, Tile};
use crate::device::fused_portable::MAX_SHADOW_ROWS;
use crate::device::{
    ConfiguredKernel, Device, DeviceHead, DeviceMatrix, DeviceShadow, Epilogue, FusedOutput, Grid, HostCounter, Kernel,
    LoadedPortable, Portable, PortableOutput, Products, Queue, Residency, Scratch, entries, tensor_map,
};
use crate::error::CudaError;
use core::mem::offset_of;
use flash_sampling_core::DType;
use flash_sampling_core::backend::code_stride;
use std::sync::Arc;

/// One instance per type of weight and hidden states.
pub(crate) static SOURCE: KernelSource = KernelSource { file: "shadow.cu", serves: kernels::any, instances };

fn instances() -> Vec<Instance> {
    [DType::BF16, DType::F16].map(instance).into()
}

fn instance(dtype: DType) -> Instance {
    Instance::new(&[("OPERAND", &abi::element_name(dtype))])
}

/// The maximum number of rows of a launch on Hopper. With more rows, the full kernel is as fast.
pub(crate) const MAX_ROWS: usize = 96;

/// Threads of a block of `hidden_digits`; each block handles a row.
const DIGIT_THREADS: u32 = 256;

/// The kernels of a planned head with a shadow, and their memory.
#[derive(Debug)]
pub(crate) struct ShadowKernels {
    head: DeviceHead,
    shadow: DeviceShadow,
    digits: Kernel<(ShadowCall,)>,
    candidates: CandidateKernels,
    winners: ConfiguredKernel<(Call, ShadowCall)>,
    scratch: Scratch,
    /// The rows of all launches that the shadow did not decide. Dropped after the scratch, which waits for launches.
    undecided: HostCounter,
    places: Places,
    max_rows: usize,
}

/// The kernels that list candidates: on Hopper, or the portable kernel.
#[derive(Debug)]
enum CandidateKernels {
    Hopper(Box<HopperKernels>),
    Portable(Vec<Arc<LoadedPortable>>),
}

/// The Hopper kernels, and the tensor maps of the shadow.
#[derive(Debug)]
struct HopperKernels {
    candidates: Vec<Arc<Loaded>>,
    /// For calls with filters, loaded at the first such call.
    lists: Option<ListKernels>,
    codes: TensorMap,
    granule: TensorMap,
}

/// The kernels of calls with filters.
#[derive(Debug)]
struct ListKernels {
    candidates: Vec<Arc<Loaded>>,
    exact: ConfiguredKernel<(Call, ShadowCall, FilterListCall)>,
}

/// The largest top-k of rows whose draw reads the shadow, in calls of at most [`MAX_TOP_K_ROWS`] rows and
/// [`MAX_TOP_K_ELEMENTS`] elements of hidden states. Each token of a top-k takes about six logits from the weight. In
/// larger calls, this takes longer than lists from the weight.
pub(crate) const LARGEST_TOP_K: u32 = 128;
pub(crate) const MAX_TOP_K_ROWS: usize = 64;
pub(crate) const MAX_TOP_K_ELEMENTS: usize = 64 * 4096;

/// Byte offsets of the parts of the scratch. Its first part, at offset 0, holds the [`ShadowWords`].
#[derive(Clone, Copy, Debug)]
struct Places {
    digits: usize,
    bounds: usize,
    counts: usize,
    keys: usize,
    estimates: usize,
    estimated: usize,
    best: usize,
    winners: usize,
    arrived: usize,
    end: usize,
}

impl Places {
    fn new(max_rows: usize, cols: usize) -> Places {
        let mut end = size_of::<ShadowWords>();
        let mut part = |bytes: usize| {
            let at = end.next_multiple_of(128);
            end = at + bytes;
            at
        };
        Places {
            digits: part(digit_rows(max_rows) * code_stride(cols)),
            bounds: part(max_rows * size_of::<HiddenBound>()),
            counts: part(max_rows * size_of::<u32>()),
            keys: part(max_rows * CANDIDATE_ROOM * size_of::<u64>()),
            estimates: part(max_rows * CANDIDATE_ROOM * size_of::<u32>()),
            estimated: part(max_rows * size_of::<EstimateCounts>()),
            best: part(max_rows * size_of::<u64>()),
            winners: part(max_rows * MAX_PARTS * size_of::<PartWinner>()),
            arrived: part(max_rows * size_of::<u32>()),
            end,
        }
    }
}

/// Rows of digits: two for each row of the batch, in whole octets for each block of a cluster.
fn digit_rows(max_rows: usize) -> usize {
    2 * max_rows.next_multiple_of(16)
}

impl ShadowKernels {
    /// Loads the kernels for up to `max_rows` rows, and allocates their memory. Returns `None` if draws of this head
    /// cannot read the shadow.
    pub(crate) fn new(
        head: &DeviceHead,
        max_rows: usize,
        is_hopper: bool,
        device: &Arc<Device>,
    ) -> Result<Option<Self>, CudaError> {
        let Some(shadow) = head.usable_shadow() else { return Ok(None) };
        let max_rows = max_rows.min(if is_hopper { MAX_ROWS } else { MAX_SHADOW_ROWS });
        let instance = instance(head.weight.dtype);
        let codes = codes(head, &shadow);
        let candidates = if is_hopper {
            CandidateKernels::Hopper(Box::new(HopperKernels {
                candidates: load(max_rows, FusedVariant::Candidates, device)?,
                lists: None,
                codes: tensor_map::encode(&codes, 64)?,
                granule: tensor_map::encode(&codes, 16)?,
            }))
        } else {
            let planned = Portable::up_to(max_rows, Products::Shadow, Epilogue::Candidates);
            CandidateKernels::Portable(planned.map(|instance| device.portable(instance)).collect::<Result<_, _>>()?)
        };
        let places = Places::new(max_rows, head.weight.cols);
        let words = 0..size_of::<ShadowWords>();
        let scratch = Scratch::new(places.end, core::slice::from_ref(&words), device)?;
        Ok(Some(ShadowKernels {
            head: *head,
            shadow,
            digits: device.function(&SOURCE, &instance, &entries::HIDDEN_DIGITS)?,
            candidates,
            winners: ConfiguredKernel::load_instance(device, &SOURCE, &instance, &entries::EXACT_WINNERS)?,
            scratch,
            undecided: HostCounter::new(device.context())?,
            places,
            max_rows,
        }))
    }

    /// The maximum number of rows of a launch.
    pub(crate) fn max_rows(&self) -> usize {
        self.max_rows
    }

    /// Records that every launch has run: see [`Scratch::mark_idle`].
    pub(crate) fn mark_idle(&mut self) {
        self.scratch.mark_idle();
    }

    /// The rows of all complete launches that the shadow did not decide. Wraps around.
    pub(crate) fn undecided(&self) -> u32 {
        self.undecided.get()
    }

    /// Loads the kernels of calls with filters, if the Hopper kernel draws.
    pub(crate) fn prepare_lists(&mut self, device: &Device) -> Result<(), CudaError> {
        let CandidateKernels::Hopper(hopper) = &mut self.candidates else { return Ok(()) };
        if hopper.lists.is_none() {
            let candidates = load(self.max_rows, FusedVariant::ListedCandidates, device)?;
            let instance = instance(self.head.weight.dtype);
            let exact = ConfiguredKernel::load_instance(device, &SOURCE, &instance, &entries::EXACT_LISTS)?;
            hopper.lists = Some(ListKernels { candidates, exact });
        }
        Ok(())
    }

    /// Draws for these rows, at most [`ShadowKernels::max_rows`]. Returns the address of a word that is 0 unless the
    /// full kernel must draw.
    pub(crate) fn launch(
        &mut self,
        queue: Queue<'_>,
        hidden: &DeviceMatrix,
        call: Call,
        device: &Device,
    ) -> Result<DeviceAddress<u32>, CudaError> {
        let shadow = self.begin(queue, hidden)?;
        let (blocks, words) = (blocks_of_winners(hidden.rows, device), shadow.words.cast());
        let digits = self.digits_of(&shadow);
        match &mut self.candidates {
            CandidateKernels::Hopper(hopper) => {
                let output = FusedOutput::Candidates(shadow.candidates);
                hopper.launch(queue, (hidden.rows, call), (&shadow, digits), &output, device)?;
                self.winners.launch_early(queue, blocks, (call, shadow))?;
            }
            CandidateKernels::Portable(kernels) => {
                let codes = codes(&self.head, &self.shadow);
                let matrices = Matrices::of(&codes, WeightScales::default(), &digits, 16);
                let instance = Portable::for_rows(hidden.rows, Products::Shadow, Epilogue::Candidates);
                let kernel = LoadedPortable::of(kernels, instance, device)?;
                let of_candidates = Call { best: shadow.best, ..call };
                let output = PortableOutput::Candidates(shadow.candidates);
                kernel.launch(queue, of_candidates, matrices, output, kernel.blocks(call.tokens))?;
                self.winners.launch(queue, blocks, (call, shadow))?;
            }
        }
        Ok(words)
    }

    /// Draws for rows without filters, and writes the lists of rows with listed filters, by the Hopper kernel. Rows
    /// that the shadow does not decide are [`UNDECIDED`](crate::abi::status::UNDECIDED). The launches end at once if
    /// `call.skip_if` requires it. The launch before them must not write the word of `call.skip_if`.
    pub(crate) fn launch_lists(
        &mut self,
        queue: Queue<'_>,
        hidden: &DeviceMatrix,
        call: Call,
        filtered: FilterListCall,
        device: &Device,
    ) -> Result<(), CudaError> {
        self.prepare_lists(device)?;
        let shadow = self.begin(queue, hidden)?;
        let output = FusedOutput::ListedCandidates(shadow.candidates, filtered.lists);
        let digits = self.digits_of(&shadow);
        let CandidateKernels::Hopper(hopper) = &self.candidates else {
            unreachable!("only the Hopper kernel has lists")
        };
        hopper.launch(queue, (hidden.rows, call), (&shadow, digits), &output, device)?;
        let lists = hopper.lists.as_ref().expect("they are prepared");
        lists.exact.launch_early(queue, blocks_of_winners(hidden.rows, device), (call, shadow, filtered))
    }

    /// Launches `hidden_digits`. Returns the argument of the next launches.
    fn begin(&mut self, queue: Queue<'_>, hidden: &DeviceMatrix) -> Result<ShadowCall, CudaError> {
        let (scratch, places) = (self.scratch.begin_use::<u8>(), self.places);
        let (weight, words) = (&self.head.weight, scratch.cast::<ShadowWords>());
        let bounds = scratch.add(places.bounds).cast();
        let candidates = Candidates {
            scales: self.shadow.scales,
            errors: self.shadow.errors,
            norms: self.shadow.norms,
            bounds,
            counts: scratch.add(places.counts).cast(),
            keys: scratch.add(places.keys).cast(),
            estimates: scratch.add(places.estimates).cast(),
            weight: weight.address,
            hidden: hidden.address,
            weight_stride: weight.stride_bytes(),
            hidden_stride: hidden.stride_bytes(),
            width: weight.cols as u32,
            element: abi::element(weight.dtype),
            estimated: scratch.add(places.estimated).cast(),
        };
        let shadow = ShadowCall {
            candidates,
            digits: scratch.add(places.digits),
            digit_stride: code_stride(weight.cols) as u64,
            bounds,
            best: scratch.add(places.best).cast(),
            winners: scratch.add(places.winners).cast(),
            arrived: scratch.add(places.arrived).cast(),
            words,
            largest: self.shadow.largest,
            zero: 0,
            undecided: self.undecided.address(),
        };
        queue.launch(&self.digits, Grid::of(hidden.rows as u32, DIGIT_THREADS), (shadow,))?;
        Ok(shadow)
    }

    /// The digits of the hidden states of a launch.
    fn digits_of(&self, shadow: &ShadowCall) -> DeviceMatrix {
        DeviceMatrix {
            address: shadow.digits,
            dtype: DType::I8,
            rows: digit_rows(self.max_rows),
            cols: self.head.weight.cols,
            row_stride: shadow.digit_stride as usize,
        }
    }
}

impl HopperKernels {
    /// Launches the Hopper kernel with this output, after `hidden_digits`.
    fn launch(
        &self,
        queue: Queue<'_>,
        (rows, call): (usize, Call),
        (shadow, digits): (&ShadowCall, DeviceMatrix),
        output: &FusedOutput,
        device: &Device,
    ) -> Result<(), CudaError> {
        let kernels = match (output, &self.lists) {
            (FusedOutput::ListedCandidates(..), Some(lists)) => &lists.candidates,
            _ => &self.candidates,
        };
        let fits = |kernel: &&Arc<Loaded>| kernel.tile.columns as usize >= rows;
        let kernel = kernels.iter().find(fits).expect("the planned tiles reach the planned rows");
        let digits = tensor_map::encode(&digits, 2 * kernel.tile.loaded_rows(rows))?;
        let scales = WeightScales::default();
        let maps = Maps { weight: self.codes, granule: self.granule, hidden: digits, scales, ..Maps::default() };
        let published = shadow.words.cast::<u8>().add(offset_of!(ShadowWords, published)).cast();
        let of_candidates = Call { best: shadow.best, arrived: published, ..call };
        let blocks = kernel.blocks(call.tokens, device.multiprocessors());
        kernel.launch(queue, blocks, of_candidates, maps, (output, Residency::Early))
    }
}

/// The codes of a shadow.
fn codes(head: &DeviceHead, shadow: &DeviceShadow) -> DeviceMatrix {
    let (rows, cols) = (head.weight.rows, head.weight.cols);
    DeviceMatrix { address: shadow.codes.cast(), dtype: DType::I8, rows, cols, row_stride: code_stride(cols) }
}

/// Loads the kernels of a variant with candidates.
fn load(max_rows: usize, variant: FusedVariant, device: &Device) -> Result<Vec<Arc<Loaded>>, CudaError> {
    Tile::up_to(max_rows, DType::I8, variant).map(|tile| device.kernel(tile)).collect()
}

/// The blocks of `exact_winners` or `exact_lists`: the same number for each row.
fn blocks_of_winners(rows: usize, device: &Device) -> u32 {
    let rows = rows as u32;
    (device.multiprocessors() / rows).clamp(1, MAX_PARTS as u32) * rows
}
