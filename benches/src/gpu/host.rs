//! The time of the processor to enqueue a call on an idle GPU.

use super::head::{Calls, OnDevice};
use super::{LOG_Z, OURS};
use crate::gpu::read::{driver, failed};
use crate::record::Call;
use cudarc::driver::CudaStream;
use flash_sampling::cuda::DeviceAddress;
use flash_sampling::cuda::abi::{Draw, Row};
use flash_sampling::cuda::{CudaError, Device, DeviceDraws, DeviceMatrix, DeviceStandalone, DeviceTiled, RowFeatures};
use flash_sampling_cli::error::CommandError;
use flash_sampling_cli::input::synthetic::Logits;
use flash_sampling_cli::interrupt::Interrupt;
use std::sync::Arc;
use std::time::Instant;

/// Times `calls` calls of every entry point: the draw, the draw with log Z, and a draw from existing logits.
///
/// # Errors
/// Errors of the backend and the driver, Ctrl-C.
pub fn times(
    head: &OnDevice,
    rows: usize,
    calls: usize,
    device: &Arc<Device>,
    stream: &Arc<CudaStream>,
    interrupt: &Interrupt,
) -> Result<Vec<Call>, CommandError> {
    let allocate = driver("allocate memory");
    let weight = head.weight();
    let (vocab, dtype) = (weight.rows, weight.dtype);
    let hidden = head.states(Logits::Peaked, rows);
    let held = stream.alloc_zeros::<Draw>(rows).map_err(&allocate)?;
    let held_log_z = stream.alloc_zeros::<f64>(rows).map_err(&allocate)?;
    let held_logits = stream.alloc_zeros::<u8>(rows * vocab * dtype.block_bytes()).map_err(&allocate)?;
    let (draws, log_z) = (DeviceAddress::of(&held, stream), DeviceAddress::of(&held_log_z, stream));
    let address = DeviceAddress::of(&held_logits, stream);
    let logits = DeviceMatrix { address, dtype, rows, cols: vocab, row_stride: vocab };
    // SAFETY: the weight is device memory of this size, which `head` holds and no code writes to.
    let mut tiled = unsafe { DeviceTiled::new(head.head(), rows, device) }.map_err(failed)?;
    let mut standalone = DeviceStandalone::new(0..vocab as u32, dtype, rows, device).map_err(failed)?;
    let mut params = Calls::new(rows, calls, false, stream)?;
    let mut list = Vec::new();
    let mut time = |what: &str, call: &mut dyn FnMut(DeviceAddress<Row>) -> Result<(), CudaError>| {
        // The first call may load kernels.
        call(params.advance().0).map_err(failed)?;
        let mut times = Vec::with_capacity(calls);
        for _ in 0..calls {
            interrupt.check()?;
            stream.synchronize().map_err(driver("wait for a call"))?;
            let next = params.advance().0;
            let start = Instant::now();
            call(next).map_err(failed)?;
            times.push(start.elapsed().as_secs_f64());
        }
        stream.synchronize().map_err(driver("wait for a call"))?;
        times.sort_by(f64::total_cmp);
        let (hidden, median) = (weight.cols, times[calls / 2]);
        list.push(Call { what: what.into(), vocab, hidden, rows, calls, median });
        Ok::<_, CommandError>(())
    };
    // SAFETY: hidden states, logits, draws and log Z of `rows` rows, held by `head` and this function; the parameters
    // have the layout of `Calls`; one stream, so launches are sequential.
    unsafe {
        time(OURS[1], &mut |next| tiled.launch(stream, &hidden, next, draws, RowFeatures::Bare))?;
        time(LOG_Z, &mut |next| tiled.launch_with_log_z(stream, &hidden, next, draws, log_z, RowFeatures::Bare))?;
        time("standalone", &mut |next| {
            standalone.launch(stream, &logits, &DeviceDraws { count: rows, rows: next, sources: None, draws })
        })?;
    }
    Ok(list)
}
