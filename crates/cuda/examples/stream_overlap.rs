//! How well a streamed head hides its parts behind each other: a call over blocks that come from host memory, beside the
//! reading, the copying and the multiplying of the same blocks alone. Needs a GPU.
//!
//! ```sh
//! cargo run --release -p flash-sampling-cuda --features driver --example stream_overlap [VOCAB HIDDEN BLOCK_MIB]
//! ```
//! Milliseconds, the shortest of some rounds by turns. "of the longest" is the call over the longest of its parts: 1 where
//! all else is hidden. With "reads nothing" the reader leaves in place what is there, as a disk would that writes there by
//! itself.
#![allow(unsafe_code, clippy::print_stdout, missing_docs)]

use flash_sampling_core::{DType, Matrix, Plan, RowParams, Samples, StreamHead};
use flash_sampling_cuda::cudarc::driver::{CudaStream, DevicePtr};
use flash_sampling_cuda::{CudaStreamed, Device, DeviceGroups, DeviceHead, DeviceMatrix, GroupRule, abi};
use std::error::Error;
use std::io::Read;
use std::sync::Arc;
use std::time::Instant;

const GROUP: u32 = 512;
const ROUNDS: usize = 7;

/// A reader that leaves in place what is there.
struct Nothing;

impl Read for Nothing {
    fn read(&mut self, to: &mut [u8]) -> std::io::Result<usize> {
        Ok(to.len())
    }
}

/// Numbers of either sign around 0.01, in bf16.
fn numbers(count: usize) -> Vec<u8> {
    let mut state = 1u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (0x3c00 | (state >> 48) as u16 & 0x80ff).to_le_bytes()
    };
    (0..count).flat_map(|_| next()).collect()
}

/// Milliseconds of `work` and of what it has enqueued on a stream.
fn timed(stream: &CudaStream, work: impl FnOnce() -> Result<(), Box<dyn Error>>) -> Result<f64, Box<dyn Error>> {
    stream.synchronize()?;
    let start = Instant::now();
    work()?;
    stream.synchronize()?;
    Ok(start.elapsed().as_secs_f64() * 1e3)
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut sizes = std::env::args().skip(1).map(|word| word.parse::<usize>());
    let mut size = |usual| sizes.next().unwrap_or(Ok(usual));
    let (vocab, hidden, block_bytes) = (size(151_936)?, size(4096)?, size(64)? << 20);
    let device = Device::new(0)?;
    let stream = device.context().new_stream()?;
    let weight = numbers(vocab * hidden);
    println!(
        "{vocab} x {hidden} bf16 ({} MB), groups of {GROUP}, milliseconds, best of {ROUNDS}",
        weight.len() / 1_000_000
    );
    for rows in [1, 16, 64, 256] {
        let states = numbers(rows * hidden);
        let input = Matrix::from_bytes(&states, DType::BF16, rows, hidden, hidden)?;
        let params: Vec<_> = (0..rows as u64).map(|seed| RowParams { seed, ..RowParams::default() }).collect();
        let plan = Plan { max_rows: rows, ..Plan::default() };
        let head = StreamHead::new(vocab, hidden, DType::BF16);
        let mut streamed = CudaStreamed::online(head, plan, GROUP, block_bytes, &device)?;
        let mut out = Samples::new();
        let tokens = streamed.block_tokens();
        let parts: Vec<usize> = (0..vocab).step_by(tokens).map(|first| tokens.min(vocab - first)).collect();

        // SAFETY: it is written before anything reads it.
        let mut pinned = unsafe { device.context().alloc_pinned_with_flags::<u8>(tokens * hidden * 2, 0) }?;
        pinned.as_mut_slice()?.copy_from_slice(&weight[..tokens * hidden * 2]);
        let mut block = stream.clone_htod(pinned.as_slice()?)?;
        let hidden_there = stream.clone_htod(&states)?;
        let row = |p: &RowParams<'_>| abi::Row { seed: p.seed, inv_temperature: 1.0, ..abi::Row::default() };
        let rows_there = stream.clone_htod(&params.iter().map(row).collect::<Vec<_>>())?;
        let draws_there = stream.alloc_zeros::<abi::Draw>(rows)?;
        let matrix =
            |address, rows| DeviceMatrix { address, dtype: DType::BF16, rows, cols: hidden, row_stride: hidden };
        let mut kernels = Vec::new();
        let at = |slice: &_, stream: &Arc<CudaStream>| DevicePtr::<u8>::device_ptr(slice, stream).0;
        let block_at = at(&block, &stream);
        for &count in &parts {
            let weight = matrix(block_at, count);
            let head = DeviceHead { weight, first_token: 0, bias: None, soft_cap: None, scale: 1.0 };
            // SAFETY: the block has room for as many tokens and outlives the kernels, which are waited for.
            kernels.push(unsafe { DeviceGroups::new(head, rows, GROUP, GroupRule::Online, &device) }?);
        }
        let states_there = matrix(at(&hidden_there, &stream), rows);
        let (rows_at, draws_at) = (rows_there.device_ptr(&stream).0, draws_there.device_ptr(&stream).0);

        let mut best = [f64::INFINITY; 5];
        for _ in 0..ROUNDS {
            let times = [
                timed(&stream, || Ok(streamed.sample(&mut weight.as_slice(), input, &params, &mut out)?))?,
                timed(&stream, || Ok(streamed.sample(&mut Nothing, input, &params, &mut out)?))?,
                timed(&stream, || {
                    let mut reader = weight.as_slice();
                    let to = pinned.as_mut_slice()?;
                    parts.iter().try_for_each(|count| Ok(reader.read_exact(&mut to[..count * hidden * 2])?))
                })?,
                timed(&stream, || {
                    let from = pinned.as_slice()?;
                    let copy = |&count: &usize| {
                        let bytes = count * hidden * 2;
                        Ok(stream.memcpy_htod(&from[..bytes], &mut block.slice_mut(..bytes))?)
                    };
                    parts.iter().try_for_each(copy)
                })?,
                timed(&stream, || {
                    kernels.iter_mut().try_for_each(|kernel| {
                        // SAFETY: all of it is on the device and outlives the launches; one stream is used.
                        Ok(unsafe { kernel.launch(&stream, &states_there, rows_at, draws_at, None) }?)
                    })
                })?,
            ];
            best.iter_mut().zip(times).for_each(|(best, time)| *best = best.min(time));
        }
        let [call, no_read, read, copy, compute] = best;
        println!(
            "{rows:>4} rows, {} blocks: read {read:.1}, copy {copy:.1}, multiply {compute:.1}; call {call:.1}: {:.3} of the \
             longest; reads nothing {no_read:.1}: {:.3} of the longest",
            parts.len(),
            call / read.max(copy).max(compute),
            no_read / copy.max(compute),
        );
    }
    Ok(())
}
