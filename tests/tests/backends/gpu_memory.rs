//! Device memory for tests: copied matrices, a sampler over copied heads, and captured launches.

use super::gpu_columns::Arrays;
use flash_sampling_conformance::problem::Problem;
use flash_sampling_conformance::suite::capture_lock;
use flash_sampling_core::{Description, Head, Matrix, PerturbedArgmax, Plan, RowParams, SampleError, Samples};
use flash_sampling_cuda::abi::TokenColumns;
use flash_sampling_cuda::cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use flash_sampling_cuda::cudarc::driver::{CudaContext, CudaGraph, CudaSlice, CudaStream};
use flash_sampling_cuda::{
    CudaError, Device, DeviceAddress, DeviceHead, DeviceHidden, DeviceMatrix, DeviceSampler, DeviceScales,
    DeviceShadow, ShadowMemory, abi,
};
use std::ops::Range;
use std::sync::Arc;

/// The value of draws before a launch writes them.
pub(crate) const POISON: abi::Draw = abi::Draw { token: !0, score: f32::NAN, logit: f32::NAN, status: !0 };

/// Returns status, token, and the bits of score and logit.
pub(crate) fn bits(draws: &[abi::Draw]) -> Vec<(u32, u32, u32, u32)> {
    draws.iter().map(|d| (d.status, d.token, d.score.to_bits(), d.logit.to_bits())).collect()
}

/// Asserts that each draw has the bits of the first draw of its row.
pub(crate) fn assert_drawn(found: &[abi::Draw], want: &Samples, what: &str) {
    let first = |want: flash_sampling_core::Draw| abi::Draw {
        token: want.token,
        score: want.score,
        logit: want.logit,
        status: abi::status::DRAWN,
    };
    let want: Vec<_> = want.iter().map(|row| first(row.unwrap().draws[0])).collect();
    assert_eq!(bits(found), bits(&want), "{what}");
}

/// Captures launches into a graph.
pub(crate) fn captured(stream: &Arc<CudaStream>, launch: impl FnOnce() -> Result<(), CudaError>) -> CudaGraph {
    let capturing = capture_lock();
    stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    let launched = launch();
    let graph = stream.end_capture(CUgraphInstantiate_flags(0));
    drop(capturing);
    launched.unwrap();
    graph.unwrap().unwrap()
}

/// A head, hidden states, rows and draws in device memory.
pub(crate) struct OnDevice {
    pub(crate) device: Arc<Device>,
    pub(crate) stream: Arc<CudaStream>,
    pub(crate) head: DeviceHead,
    pub(crate) hidden: DeviceMatrix,
    /// The addresses of rows and draws, taken before any capture, because taking an address orders streams.
    pub(crate) rows_at: DeviceAddress<abi::Row>,
    pub(crate) draws_at: DeviceAddress<abi::Draw>,
    rows: CudaSlice<abi::Row>,
    draws: CudaSlice<abi::Draw>,
    _held: [CudaSlice<u8>; 2],
}

impl OnDevice {
    /// Copies a problem without bias and soft-cap to the first GPU.
    pub(crate) fn new(problem: &Problem, first_token: u32) -> OnDevice {
        let device = Device::new(0).unwrap();
        let stream = device.context().new_stream().unwrap();
        let (of_weight, weight) = copied(problem.weight.matrix(), &stream);
        let (of_hidden, hidden) = copied(problem.input(), &stream);
        let rows = stream.clone_htod(&vec![abi::Row::default(); hidden.rows]).unwrap();
        let draws = stream.clone_htod(&vec![POISON; hidden.rows]).unwrap();
        let (rows_at, draws_at) = (DeviceAddress::of(&rows, &stream), DeviceAddress::of(&draws, &stream));
        stream.synchronize().unwrap();
        let scale = problem.scale.unwrap_or(1.0);
        let head = DeviceHead { first_token, scale, ..DeviceHead::of(weight) };
        OnDevice { device, stream, head, hidden, rows_at, draws_at, rows, draws, _held: [of_weight, of_hidden] }
    }

    /// Copies the rows of the next launches to the GPU, and fills the draws with [`POISON`].
    pub(crate) fn set(&mut self, rows: &[abi::Row]) {
        self.stream.memcpy_htod(rows, &mut self.rows).unwrap();
        self.stream.memcpy_htod(&vec![POISON; rows.len()], &mut self.draws).unwrap();
    }

    /// Sets rows that have only a seed and a position.
    pub(crate) fn set_bare(&mut self, rows: &[RowParams<'_>]) {
        let row = |row: &RowParams<'_>| abi::Row {
            seed: row.seed,
            position: row.position,
            inv_temperature: 1.0,
            ..abi::Row::default()
        };
        self.set(&rows.iter().map(row).collect::<Vec<_>>());
    }

    /// Waits for the stream, and returns the draws.
    pub(crate) fn draws(&self) -> Vec<abi::Draw> {
        let draws = self.stream.clone_dtoh(&self.draws).unwrap();
        self.stream.synchronize().unwrap();
        draws
    }
}

/// A weight, and a bias, scales and a shadow, in device memory.
pub(crate) type HeldHead = (CudaSlice<u8>, [Option<CudaSlice<f32>>; 2], Option<ShadowMemory>);

/// A head copied to a GPU, and a sampler that reads it there; or a sampler of logits, without a head.
pub(crate) struct Copied {
    pub(crate) sampler: DeviceSampler,
    pub(crate) stream: Arc<CudaStream>,
    pub(crate) held: HeldHead,
}

/// Hidden states in device memory, with a gap after each row, and the memory.
pub(crate) struct CopiedHidden {
    pub(crate) hidden: DeviceHidden,
    _held: CudaSlice<u8>,
}

impl CopiedHidden {
    /// Copies hidden states with gaps of 16 bytes, and waits.
    pub(crate) fn new(input: Matrix<'_>, stream: &Arc<CudaStream>) -> Self {
        CopiedHidden::with_gaps(input, 16, stream)
    }

    /// Copies hidden states with gaps of `gap` bytes, and waits.
    pub(crate) fn with_gaps(input: Matrix<'_>, gap: usize, stream: &Arc<CudaStream>) -> Self {
        let (rows, cols, dtype) = (input.rows(), input.cols(), input.dtype());
        let row = |row| input.row_bytes(row).iter().copied().chain(std::iter::repeat_n(0xff, gap));
        let bytes: Vec<u8> = (0..rows).flat_map(row).chain([0; 16]).collect();
        let held = stream.clone_htod(&bytes).unwrap();
        stream.synchronize().unwrap();
        let (address, row_stride) = (DeviceAddress::of(&held, stream), cols + gap / dtype.block_bytes());
        let matrix = DeviceMatrix { address, dtype, rows, cols, row_stride };
        // SAFETY: the memory has this size and is not written again, and the calls of this value are over when it is dropped.
        let hidden = unsafe { DeviceHidden::new(stream, matrix) }.unwrap();
        CopiedHidden { hidden, _held: held }
    }
}

/// Copies a matrix to device memory without gaps between rows.
pub(crate) fn copied(matrix: Matrix<'_>, stream: &Arc<CudaStream>) -> (CudaSlice<u8>, DeviceMatrix) {
    let (rows, cols, dtype) = (matrix.rows(), matrix.cols(), matrix.dtype());
    let mut bytes: Vec<u8> = (0..rows).flat_map(|row| matrix.row_bytes(row).iter().copied()).collect();
    bytes.resize(bytes.len().max(16), 0);
    let memory = stream.clone_htod(&bytes).unwrap();
    let address = DeviceAddress::of(&memory, stream);
    (memory, DeviceMatrix { address, dtype, rows, cols, row_stride: cols })
}

/// Some rows of a matrix in device memory.
pub(crate) fn part(matrix: &DeviceMatrix, rows: Range<usize>) -> DeviceMatrix {
    let at = rows.start * matrix.row_stride * matrix.dtype.block_bytes();
    DeviceMatrix { address: matrix.address.add(at), rows: rows.len(), ..*matrix }
}

impl Copied {
    pub(crate) fn new(head: Head<'_>, plan: Plan) -> Result<Self, CudaError> {
        // The stream has its own context over the same GPU, like the stream of an engine.
        Copied::on(&Device::new(0)?, CudaContext::new(0).unwrap().per_thread_stream(), head, plan)
    }

    /// A sampler of existing logits.
    pub(crate) fn for_logits(vocab_size: usize, plan: Plan, device: &Arc<Device>) -> Result<Self, CudaError> {
        let sampler = DeviceSampler::for_logits(vocab_size, plan, device)?;
        let stream = CudaContext::new(0).unwrap().per_thread_stream();
        let memory = stream.alloc_zeros(16).unwrap();
        Ok(Copied { sampler, stream, held: (memory, [None, None], None) })
    }

    pub(crate) fn on(
        device: &Arc<Device>,
        stream: Arc<CudaStream>,
        head: Head<'_>,
        plan: Plan,
    ) -> Result<Self, CudaError> {
        let tokens = head.tokens();
        let rows = head.weight_row(tokens.start)..head.weight_row(tokens.start) + tokens.len();
        let part = head.weight().row_range(rows.clone());
        let (memory, weight) = copied(part, &stream);
        let scales = part.scales().map(|scales| (scales, stream.clone_htod(scales.values(rows.len())).unwrap()));
        let bias =
            head.bias().filter(|_| !tokens.is_empty()).map(|bias| stream.clone_htod(&bias[rows.clone()]).unwrap());
        let shadow = head.shadow().filter(|_| !tokens.is_empty()).map(|shadow| shadow.row_range(rows));
        let (shadow, shadow_memory) = shadow.map(|shadow| DeviceShadow::upload(&shadow, &stream)).transpose()?.unzip();
        stream.synchronize().unwrap();
        let on_device = DeviceHead {
            weight,
            scales: scales.as_ref().map(|(scales, memory)| DeviceScales {
                address: DeviceAddress::of(memory, &stream),
                block: scales.block(),
                row_of_block: scales.row_of_block(),
            }),
            first_token: tokens.start,
            bias: bias.as_ref().map(|bias| DeviceAddress::of(bias, &stream)),
            soft_cap: head.soft_cap(),
            scale: head.scale(),
            shadow,
        };
        // SAFETY: weight, scales, bias and shadow are of these sizes, nothing writes to them, and they are dropped after
        // the sampler.
        let sampler = unsafe { DeviceSampler::new(on_device, head.vocab_size(), plan, device) }?;
        let held = (memory, [bias, scales.map(|(_, memory)| memory)], shadow_memory);
        Ok(Copied { sampler, stream, held })
    }

    /// Makes a call that waits.
    pub(crate) fn waited(&mut self, hidden: &DeviceMatrix, rows: &[RowParams<'_>]) -> Samples {
        let mut out = Samples::new();
        // SAFETY: tests hold the hidden states on this device, and this call waits.
        unsafe { self.sampler.sample(&self.stream, hidden, rows, &mut out) }.unwrap();
        out
    }

    /// Makes a call that does not wait, with room for `max_adjusted` tokens of a row.
    pub(crate) fn enqueue(&mut self, hidden: &DeviceMatrix, arrays: &Arrays, out: &TokenColumns, max_adjusted: usize) {
        self.sampler.prepare_enqueue(&arrays.columns, out, max_adjusted).unwrap();
        // SAFETY: tests hold all arrays on this device, with an element a row, until they compare the results.
        unsafe { self.sampler.enqueue(&self.stream, hidden, &arrays.columns, out) }.unwrap();
    }
}

impl PerturbedArgmax for Copied {
    fn description(&self) -> Description {
        self.sampler.description().clone()
    }

    fn sample(&mut self, input: Matrix<'_>, rows: &[RowParams<'_>], out: &mut Samples) -> Result<(), SampleError> {
        let (_memory, input) = copied(input, &self.stream);
        // SAFETY: the copy was enqueued on the same stream and lives until the call, which waits, returns.
        unsafe { self.sampler.sample(&self.stream, &input, rows, out) }
    }
}
