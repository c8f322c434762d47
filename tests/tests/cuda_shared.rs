//! The suite on the sampler whose weight and hidden states are the caller's device memory.

mod backends;

use backends::boxed;
use flash_sampling_conformance::problem::{Problem, Size};
use flash_sampling_conformance::suite::runs;
use flash_sampling_conformance::trial::RowBits;
use flash_sampling_conformance::{BuildError, SamplerFactory, suite};
use flash_sampling_core::reference::Scheme;
use flash_sampling_core::{
    Capabilities, DType, Head, LogprobsMode, Matrix, PerturbedArgmax, Plan, RowParams, SampleError, Samples, Shape,
};
use flash_sampling_cuda::cudarc::driver::{CudaSlice, CudaStream, DevicePtr};
use flash_sampling_cuda::{CudaError, CudaShared, CudaTiled, Device, DeviceHead, DeviceMatrix};
use std::sync::Arc;

/// A head copied to the first GPU, and a sampler that reads it there.
struct Copied {
    sampler: CudaShared,
    stream: Arc<CudaStream>,
    _head: (CudaSlice<u8>, Option<CudaSlice<f32>>),
}

/// A matrix row after row in device memory, and the memory.
fn copied(matrix: Matrix<'_>, stream: &Arc<CudaStream>) -> (CudaSlice<u8>, DeviceMatrix) {
    let (rows, cols, dtype) = (matrix.rows(), matrix.cols(), matrix.dtype());
    let mut bytes: Vec<u8> = (0..rows).flat_map(|row| matrix.row_bytes(row).iter().copied()).collect();
    bytes.resize(bytes.len().max(16), 0);
    let memory = stream.clone_htod(&bytes).unwrap();
    let address = memory.device_ptr(stream).0;
    (memory, DeviceMatrix { address, dtype, rows, cols, row_stride: cols })
}

impl Copied {
    fn new(head: Head<'_>, plan: Plan) -> Result<Self, CudaError> {
        let device = Device::new(0)?;
        // As an engine has them, in a context of its own over the same GPU.
        let stream = flash_sampling_cuda::cudarc::driver::CudaContext::new(0).unwrap().per_thread_stream();
        let tokens = head.tokens();
        let rows = head.weight_row(tokens.start)..head.weight_row(tokens.start) + tokens.len();
        let (memory, weight) = copied(head.weight().row_range(rows.clone()), &stream);
        let bias = head.bias().map(|bias| stream.clone_htod(&bias[rows]).unwrap());
        stream.synchronize().unwrap();
        let on_device = DeviceHead {
            weight,
            first_token: tokens.start,
            bias: bias.as_ref().map(|bias| bias.device_ptr(&stream).0),
            soft_cap: head.soft_cap(),
            scale: head.scale(),
        };
        // SAFETY: weight and bias are of these sizes, nothing writes to them, and they are dropped after the sampler.
        let sampler = unsafe { CudaShared::new(on_device, head.vocab_size(), plan, &device) }?;
        Ok(Copied { sampler, stream, _head: (memory, bias) })
    }
}

impl PerturbedArgmax for Copied {
    fn capabilities(&self) -> Capabilities {
        self.sampler.capabilities()
    }

    fn shape(&self) -> Shape {
        self.sampler.shape()
    }

    fn plan(&self) -> Plan {
        self.sampler.plan()
    }

    fn sample(&mut self, input: Matrix<'_>, rows: &[RowParams<'_>], out: &mut Samples) -> Result<(), SampleError> {
        let (_memory, hidden) = copied(input, &self.stream);
        // SAFETY: the hidden states were enqueued on the same stream and live until the call, which waits, returns.
        unsafe { self.sampler.sample(&self.stream, &hidden, rows, out) }
    }
}

struct Shared;

impl SamplerFactory for Shared {
    fn name(&self) -> String {
        "cuda/shared".into()
    }

    fn unavailable(&self) -> Option<String> {
        Device::new(0).err().map(|error| error.to_string())
    }

    fn scheme(&self, _: &Head<'_>) -> Option<Scheme> {
        Some(Scheme::Tiled)
    }

    fn pace(&self) -> usize {
        8
    }

    fn build<'w>(&self, head: Head<'w>, plan: Plan) -> Result<Box<dyn PerturbedArgmax + 'w>, BuildError> {
        match (head.tokens().is_empty(), Device::new(0)) {
            // There is nothing to point to.
            (true, Ok(device)) => boxed(CudaTiled::new(head, plan, &device)),
            _ => boxed(Copied::new(head, plan)),
        }
    }
}

suite!(shared, Shared);

/// Real inputs, rows of every kind between each other, more rows than a launch takes.
#[test]
fn results_are_those_of_the_sampler_over_host_memory() {
    if !runs(&Shared.name(), Shared.unavailable(), 1) {
        return;
    }
    const ROWS: usize = 300;
    let device = Device::new(0).unwrap();
    let plan = Plan { max_rows: ROWS, max_draws: 4, max_logprobs: Some(3), canonical: false };
    let mask = [0xfeed_beef; 60];
    let row = |r: u64| {
        let row = RowParams { seed: r, position: 3 * r, ..RowParams::default() };
        match r % 11 {
            0 => row,
            1 => RowParams { temperature: 0.0, draws: 2, ..row },
            2 => RowParams { top_k: 40, top_p: 0.9, draws: 3, ..row },
            3 => RowParams { logprobs: Some(3), ..row },
            4 => RowParams { temperature: 0.6, draws: 4, first_draw: r as u32, ..row },
            5 => RowParams { temperature: f32::NAN, ..row },
            6 => RowParams { mask: Some(&mask), logit_bias: &[(3, 1.0), (17, -2.0)], min_p: 0.02, ..row },
            7 => RowParams { draws: 4, without_replacement: true, ..row },
            8 => RowParams { typical_p: 0.7, kept: true, ..row },
            9 => RowParams { temperature: 0.5, draws: 2, logprobs: Some(3), logprobs_mode: LogprobsMode::Raw, ..row },
            _ => RowParams { min_p: 0.02, logprobs: Some(0), logprobs_mode: LogprobsMode::Raw, ..row },
        }
    };
    let rows: Vec<_> = (0..ROWS as u64).map(row).collect();
    for dtype in [DType::BF16, DType::F16] {
        let problem = Problem::gaussian(Size::new(ROWS, 1603, 64), dtype, dtype, 3);
        let (mut expected, mut found) = (Samples::new(), Samples::new());
        CudaTiled::new(problem.head(), plan, &device).unwrap().sample(problem.input(), &rows, &mut expected).unwrap();
        let mut shared = Copied::new(problem.head(), plan).unwrap();
        // A batch of one kind, and then all of them.
        let narrow = problem.input().row_range(0..1);
        shared.sample(narrow, &rows[..1], &mut found).unwrap();
        assert_eq!(RowBits::of(&found, 0), RowBits::of(&expected, 0));
        shared.sample(problem.input(), &rows, &mut found).unwrap();
        let mut apart = Vec::new();
        for (r, (expected, found)) in RowBits::all(&expected).iter().zip(&RowBits::all(&found)).enumerate() {
            if expected != found {
                println!("{dtype:?}, row {r}: expected {expected:?}\n  found {found:?}");
                apart.push(r);
            }
        }
        assert!(apart.is_empty() && found.len() == ROWS, "{} of {} rows differ", apart.len(), found.len());
    }
}

/// A thread that has never used the GPU has no current context, and rows of few draws stand beside rows of many with filters.
#[test]
fn a_call_on_a_fresh_thread_draws_the_same() {
    let factory = Shared;
    if !runs(&factory.name(), factory.unavailable(), 1) {
        return;
    }
    let problem = Problem::integers(Size::new(6, 3001, 64), DType::BF16, DType::BF16, 31);
    let plan = Plan { max_rows: 6, max_draws: 5, max_logprobs: Some(2), canonical: false };
    let base = RowParams { seed: 32, temperature: 90.0, ..RowParams::default() };
    let rows: Vec<RowParams<'_>> = (0..6)
        .map(|r| match r % 3 {
            0 => RowParams { position: r, draws: 1, min_p: 0.02, ..base },
            1 => RowParams { position: r, draws: 5, top_k: 40, ..base },
            _ => RowParams { position: r, draws: 2, logprobs: Some(2), ..base },
        })
        .collect();
    let mut want = Samples::new();
    let device = Device::new(0).unwrap();
    CudaTiled::new(problem.head(), plan, &device).unwrap().sample(problem.input(), &rows, &mut want).unwrap();
    let mut there = Copied::new(problem.head(), plan).unwrap();
    let (_memory, hidden) = copied(problem.input(), &there.stream);
    there.stream.synchronize().unwrap();
    let found = std::thread::scope(|scope| {
        let call = || {
            let mut found = Samples::new();
            // SAFETY: the hidden states are there, and live until the thread is joined.
            unsafe { there.sampler.sample(&there.stream, &hidden, &rows, &mut found) }.unwrap();
            found
        };
        scope.spawn(call).join().unwrap()
    });
    assert_eq!(RowBits::all(&found), RowBits::all(&want));
}
