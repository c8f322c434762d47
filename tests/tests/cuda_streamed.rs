//! The suite on heads whose weight comes in blocks, and what only they promise.

use flash_sampling_conformance::problem::{Problem, Size};
use flash_sampling_conformance::suite::runs;
use flash_sampling_conformance::trial::RowBits;
use flash_sampling_conformance::{BuildError, SamplerFactory, suite};
use flash_sampling_core::reference::{Reference, ReferenceVariant};
use flash_sampling_core::{
    Capabilities, DType, Head, LogprobsMode, Matrix, PerturbedArgmax, Plan, RowParams, SampleError, Samples, Shape,
    StreamError, StreamHead,
};
use flash_sampling_cuda::{CudaError, CudaStreamed, CudaTiled, Device};
use std::io::Read;

#[path = "cuda/rows.rs"]
mod rows;

use rows::rows;

/// Tokens of a group: the size that `vectors/value_stability.txt` knows.
const GROUP: u32 = 512;
/// Bytes of a block in the suite: its heads take from one block to some dozens.
const BLOCK: usize = 1 << 18;

/// A streamed variant, on the first GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Streamed {
    Online,
    Tiled,
}

impl SamplerFactory for Streamed {
    fn name(&self) -> String {
        format!("cuda/streamed-{self:?}").to_lowercase()
    }

    fn unavailable(&self) -> Option<String> {
        Device::new(0).err().map(|error| error.to_string())
    }

    fn reference_variant(&self, _: &Head<'_>) -> Option<ReferenceVariant> {
        Some(if *self == Streamed::Online { ReferenceVariant::Online(GROUP) } else { ReferenceVariant::Tiled })
    }

    fn pace(&self) -> usize {
        8
    }

    // A stream begins at the vocabulary's first token.
    fn takes_shards(&self) -> bool {
        false
    }

    fn build<'w>(&self, head: Head<'w>, plan: Plan) -> Result<Box<dyn PerturbedArgmax + 'w>, BuildError> {
        let failed = |error: CudaError| BuildError(error.to_string());
        let device = Device::new(0).map_err(failed)?;
        let stream = match self {
            Streamed::Online => CudaStreamed::online(described(&head), plan, GROUP, BLOCK, &device),
            Streamed::Tiled => CudaStreamed::tiled(described(&head), plan, BLOCK, &device),
        };
        let weight = head.weight();
        let bytes = (0..weight.rows()).flat_map(|row| weight.row_bytes(row)).copied().collect();
        Ok(Box::new(InMemory { plan, bytes, stream: stream.map_err(failed)? }))
    }
}

/// A head without its weight.
fn described<'w>(head: &Head<'w>) -> StreamHead<'w> {
    let weight = head.weight();
    StreamHead {
        vocab_size: head.tokens().len(),
        bias: head.bias(),
        soft_cap: head.soft_cap(),
        scale: head.scale(),
        ..StreamHead::new(weight.rows(), weight.cols(), weight.dtype())
    }
}

/// A streamed sampler that reads a weight in memory.
struct InMemory<'w> {
    plan: Plan,
    bytes: Vec<u8>,
    stream: CudaStreamed<'w>,
}

impl PerturbedArgmax for InMemory<'_> {
    fn capabilities(&self) -> Capabilities {
        self.stream.capabilities()
    }

    fn shape(&self) -> Shape {
        self.stream.shape()
    }

    fn plan(&self) -> Plan {
        self.plan
    }

    fn sample(&mut self, input: Matrix<'_>, rows: &[RowParams<'_>], out: &mut Samples) -> Result<(), SampleError> {
        self.stream.sample(&mut self.bytes.as_slice(), input, rows, out).map_err(|error| match error {
            StreamError::Call(error) => error,
            error => SampleError::Backend { backend: "cuda", source: Box::new(error) },
        })
    }
}

suite!(online, Streamed::Online);
suite!(tiled, Streamed::Tiled);

#[test]
fn streamed_weights_have_the_reference_bits_in_blocks_of_any_size() {
    if !runs(&Streamed::Online.name(), Streamed::Online.unavailable(), 1) {
        return;
    }
    let device = Device::new(0).unwrap();
    for (count, vocab, hidden) in [(1, 1, 1), (7, 5000, 65), (120, 3001, 64)] {
        for dtype in [DType::BF16, DType::F32] {
            let mut problem = Problem::integers(Size::new(count, vocab, hidden), dtype, dtype, 33);
            problem.bias = Some((0..vocab).map(|t| (t % 5) as f32).collect());
            problem.scale = Some(0.5);
            // More draws than a launch takes.
            let row = |row| RowParams { draws: 3, first_draw: 2, logit_bias: &[], ..row };
            let rows: Vec<RowParams<'_>> = rows(count).into_iter().map(row).collect();
            let plan = Plan { max_rows: count, max_draws: 3, ..Plan::default() };
            let bytes = problem.weight.matrix().bytes();
            for block_bytes in [1, 2000 * hidden * dtype.size(), usize::MAX] {
                let online = CudaStreamed::online(described(&problem.head()), plan, 64, block_bytes, &device).unwrap();
                let tiled = CudaStreamed::tiled(described(&problem.head()), plan, block_bytes, &device).unwrap();
                for (mut sampler, scheme) in [(online, ReferenceVariant::Online(64)), (tiled, ReferenceVariant::Tiled)]
                {
                    let (mut want, mut found) = (Samples::new(), Samples::new());
                    Reference::new(problem.head(), plan, scheme.clone())
                        .sample(problem.input(), &rows, &mut want)
                        .unwrap();
                    for _ in 0..2 {
                        sampler.sample(&mut &*bytes, problem.input(), &rows, &mut found).unwrap();
                        let (found, want) = (RowBits::all(&found), RowBits::all(&want));
                        for (r, (found, want)) in found.iter().zip(&want).enumerate() {
                            let tokens = sampler.block_tokens();
                            assert_eq!(found, want, "{scheme:?}, {vocab} tokens in blocks of {tokens}, row {r}");
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn a_stream_that_ends_early_is_an_error_that_names_the_token() {
    if !runs(&Streamed::Online.name(), Streamed::Online.unavailable(), 1) {
        return;
    }
    let device = Device::new(0).unwrap();
    let problem = Problem::gaussian(Size::new(9, 2101, 70), DType::BF16, DType::BF16, 2);
    let bytes = problem.weight.matrix().bytes();
    let plan = Plan { max_rows: 9, max_draws: 3, ..Plan::default() };
    let mut out = Samples::new();
    let mut stream = CudaStreamed::online(described(&problem.head()), plan, 512, 1, &device).unwrap();
    for (rows_there, token) in [(0, 0), (500, 0), (513, 512), (2100, 2048)] {
        let failed = stream.sample(&mut &bytes[..rows_there * 140], problem.input(), &rows(9), &mut out);
        assert!(matches!(failed, Err(StreamError::Read { token: t, .. }) if t == token), "{failed:?}");
    }
    stream.sample(&mut &*bytes, problem.input(), &rows(9), &mut out).unwrap();
    assert!(out.iter().all(|row| row.is_ok()));
    let refused = CudaStreamed::online(described(&problem.head()), Plan { canonical: true, ..plan }, 512, 1, &device);
    assert!(matches!(refused.err(), Some(CudaError::Unsupported { .. })));
}

/// More rows ask than 64 MiB have room for, and the draws of some rows fill several launches.
#[test]
fn log_probabilities_and_many_draws_are_those_of_the_head_in_memory() {
    if !runs(&Streamed::Tiled.name(), Streamed::Tiled.unavailable(), 1) {
        return;
    }
    let device = Device::new(0).unwrap();
    let problem = Problem::gaussian(Size::new(150, 151_936, 16), DType::BF16, DType::BF16, 8);
    let plan = Plan { max_rows: 150, max_draws: 300, max_logprobs: Some(4), canonical: false };
    let row = |r: usize, row| RowParams {
        logprobs: (r % 10 != 3).then_some(r as u32 % 5),
        logprobs_mode: if r % 4 == 1 { LogprobsMode::Raw } else { LogprobsMode::Processed },
        draws: if r % 50 == 7 { 300 } else { 1 + r as u32 % 3 },
        ..row
    };
    let rows: Vec<RowParams<'_>> = rows(150).into_iter().enumerate().map(|(r, params)| row(r, params)).collect();
    let (mut want, mut found) = (Samples::new(), Samples::new());
    CudaTiled::new(problem.head(), plan, &device).unwrap().sample(problem.input(), &rows, &mut want).unwrap();
    let want = RowBits::all(&want);
    let mut stream = Streamed::Tiled.build(problem.head(), plan).unwrap();
    for turn in 0..2 {
        stream.sample(problem.input(), &rows, &mut found).unwrap();
        for (r, (found, want)) in RowBits::all(&found).iter().zip(&want).enumerate() {
            assert_eq!(found, want, "row {r}, turn {turn}");
        }
    }
}

/// A reader that fails after some bytes.
struct Failing(usize);

impl Read for Failing {
    fn read(&mut self, to: &mut [u8]) -> std::io::Result<usize> {
        let count = to.len().min(self.0).min(7777);
        if count == 0 {
            return Err(std::io::Error::other("the disk is gone"));
        }
        to[..count].fill(0x3f);
        self.0 -= count;
        Ok(count)
    }
}

/// Copies and launches of the blocks that came are under way then, and use memory that is freed.
#[test]
fn a_stream_is_dropped_while_the_work_of_a_call_that_failed_is_under_way() {
    if !runs(&Streamed::Online.name(), Streamed::Online.unavailable(), 1) {
        return;
    }
    let device = Device::new(0).unwrap();
    let problem = Problem::integers(Size::new(64, 20_011, 512), DType::BF16, DType::BF16, 3);
    let rows = rows(64);
    let plan = Plan { max_rows: 64, max_draws: 3, max_logprobs: Some(1), canonical: false };
    let asking: Vec<RowParams<'_>> = rows.iter().map(|row| RowParams { logprobs: Some(1), ..*row }).collect();
    let (mut want, mut out) = (Samples::new(), Samples::new());
    Reference::new(problem.head(), plan, ReferenceVariant::Tiled).sample(problem.input(), &asking, &mut want).unwrap();
    let want = RowBits::all(&want);
    let bytes = problem.weight.matrix().bytes();
    for share in [1, 3, 7, 12, 19] {
        for turn in 0..4 {
            let mut stream = CudaStreamed::tiled(described(&problem.head()), plan, 1 << 20, &device).unwrap();
            let mut reader = Failing(bytes.len() / 20 * share);
            let failed = stream.sample(&mut reader, problem.input(), &asking, &mut out);
            let Err(StreamError::Read { token, source }) = failed else { panic!("{failed:?}") };
            assert!(token.is_multiple_of(stream.block_tokens()) && source.to_string() == "the disk is gone");
            assert!(out.is_empty());
            if turn % 2 == 1 {
                // The same value goes on as if nothing had been.
                stream.sample(&mut &*bytes, problem.input(), &asking, &mut out).unwrap();
                assert_eq!(RowBits::all(&out), want, "after {share} of 20 parts");
            }
            drop(stream);
        }
        device.context().synchronize().unwrap();
        device.context().check_err().unwrap();
    }
}
