//! An engine's loop with device memory: captures the draw in a CUDA graph once, and replays it with each step's rows.
//!
//! `cargo run --release --example device_graph -p flash-sampling --features cuda`
//!
//! In a real engine, the graph has the model's layers before the draw; here the hidden states are constant. The graph
//! reads the rows from a fixed address in device memory. Each step copies the block of a `RowEncoder` there.

use flash_sampling::cuda::cudarc::driver::CudaStream;
use flash_sampling::cuda::cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use flash_sampling::cuda::{
    Device, DeviceAddress, DeviceHead, DeviceMatrix, DeviceTiled, RowEncoder, RowFeatures, abi,
};
use flash_sampling::{DType, History, RowParams};
use std::error::Error;
use std::sync::Arc;

const VOCAB: usize = 32_000;
const HIDDEN: usize = 128;
const ROWS: usize = 4;
const STEPS: u64 = 8;
/// Device bytes for the rows of a step and their lists.
const ROOM: usize = 1 << 16;

/// Numbers in bf16, computed from their indices.
fn bf16(count: usize, salt: usize) -> Vec<u16> {
    (0..count).map(|i| (((i * salt) % 2003) as f32 / 1000.0 - 1.0).to_bits()).map(|bits| (bits >> 16) as u16).collect()
}

fn main() -> Result<(), Box<dyn Error>> {
    let device = Device::new(0)?;
    let stream: Arc<CudaStream> = device.context().new_stream()?;
    let weight = stream.clone_htod(&bf16(VOCAB * HIDDEN, 7919))?;
    let hidden = stream.clone_htod(&bf16(ROWS * HIDDEN, 5003))?;
    let mut rows = stream.alloc_zeros::<u8>(ROOM)?;
    let draws = stream.alloc_zeros::<abi::Draw>(ROWS)?;
    // Before the capture, because computing an address may add a dependency between streams.
    let (rows_at, draws_at) = (DeviceAddress::of(&rows, &stream), DeviceAddress::of(&draws, &stream));
    let matrix = |address, rows| DeviceMatrix { address, dtype: DType::BF16, rows, cols: HIDDEN, row_stride: HIDDEN };
    let hidden = matrix(DeviceAddress::of(&hidden, &stream).cast(), ROWS);
    let weight_at = matrix(DeviceAddress::of(&weight, &stream).cast(), VOCAB);
    let head = DeviceHead::of(weight_at);

    // SAFETY: the weight is memory of this device, of this size, and nothing writes to it. The weight and the sampler
    // are dropped after the graph.
    let mut sampler = unsafe { DeviceTiled::new(head, ROWS, &device) }?;
    // Loads the kernel, which the captured launch must not do.
    sampler.prepare(RowFeatures::Any)?;
    stream.synchronize()?;

    stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?;
    // SAFETY: hidden states, rows and draws are memory of this device, of these sizes, until the graph is dropped. Each
    // replay reads rows of a `RowEncoder`, of any features. All work is on one stream.
    let launched = unsafe { sampler.launch(&stream, &hidden, rows_at.cast(), draws_at, RowFeatures::Any) };
    let graph = stream.end_capture(CUgraphInstantiate_flags(0))?.ok_or("nothing was captured")?;
    launched?;

    let mut encoder = RowEncoder::new(0..VOCAB as u32, VOCAB as u32);
    let mut histories = [(); ROWS].map(|()| History::new(&[1, 2, 3]));
    for step in 0..STEPS {
        let params = histories.iter().zip(0..).map(|(history, seed)| RowParams {
            seed,
            position: step,
            history: Some(history),
            repetition_penalty: if seed == 1 { 1.2 } else { 1.0 },
            temperature: if seed == 2 { 0.0 } else { 0.8 },
            ..RowParams::default()
        });
        encoder.encode(&params.collect::<Vec<_>>())?;
        if encoder.len() > ROOM {
            return Err("the lists of the rows need more room".into());
        }
        let block = encoder.block(rows_at);
        stream.memcpy_htod(block, &mut rows.slice_mut(..block.len()))?;
        graph.launch()?;
        let drawn = stream.clone_dtoh(&draws)?;
        stream.synchronize()?;
        for (history, draw) in histories.iter_mut().zip(drawn) {
            if draw.status != abi::status::DRAWN {
                return Err(format!("a row has status {}", draw.status).into());
            }
            history.push(draw.token);
        }
    }
    histories.iter().for_each(|history| println!("{:?}", history.output()));
    Ok(())
}
