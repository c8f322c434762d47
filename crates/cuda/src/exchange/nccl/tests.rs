//! Tests of the NCCL exchange with synthetic draws and one GPU per rank. Skipped with fewer than two GPUs, unless
//! `FLASH_SAMPLING_REQUIRE` names nccl.

use super::*;
use crate::abi::DeviceAddress;
use crate::abi::Row;
use crate::device::row_features::RowFeatures;
use crate::exchange::peers::tests::fan_out::{Part, rows};
use crate::exchange::peers::tests::{capture_lock, shard_draw, whole_draw};
use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use std::io::Write;
use std::thread;

const LIMIT: Duration = Duration::from_secs(20);

/// All GPUs, at most four.
fn devices() -> Option<Vec<Arc<Device>>> {
    let devices: Vec<_> = (0..4).map_while(|ordinal| Device::new(ordinal).ok()).collect();
    if devices.len() > 1 && is_present() {
        return Some(devices);
    }
    let required = std::env::var("FLASH_SAMPLING_REQUIRE").unwrap_or_default();
    assert!(!required.split(',').any(|r| r == "nccl"), "no library, or one GPU; FLASH_SAMPLING_REQUIRE names nccl");
    // The test harness captures the print macros, but not this write.
    let _ = writeln!(std::io::stderr(), "skipped: 1 test of cuda/nccl: no library, or no GPU for each of two ranks");
    None
}

/// Token, score and status. The logit is omitted: NCCL returns score minus noise, and synthetic draws have no noise.
fn bits(draw: &Draw) -> (u32, u32, u32) {
    (draw.token, draw.score.to_bits(), draw.status)
}

/// A graph of the three launches, replayed with other draws.
#[test]
fn a_captured_launch_is_replayed() {
    const ROWS: usize = 9;
    let Some(devices) = devices() else { return };
    let _alone = capture_lock();
    let (id, world) = (NcclId::new().unwrap(), devices.len());
    let rank = |number: usize, device: &Arc<Device>| {
        let mut nccl = NcclEndpoint::new(number, world, ROWS, device).unwrap().connect(&id, LIMIT).unwrap();
        let stream = device.stream().unwrap();
        let rows: Vec<_> = (0..ROWS).map(|row| Row { seed: row as u64, ..Row::default() }).collect();
        let (rows, mut held) = (stream.clone_htod(&rows).unwrap(), stream.alloc_zeros(ROWS).unwrap());
        // Addresses are taken first, since taking them during a capture would be captured.
        let (rows_at, draws_at) = (DeviceAddress::of(&rows, &stream), DeviceAddress::of(&held, &stream));
        stream.synchronize().unwrap();
        stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
        // SAFETY: rows and draws have this size and live until the wait for the last replay; one stream.
        let captured = unsafe { nccl.launch(&stream, rows_at, draws_at, ROWS) };
        let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
        let graph = stream.end_capture(flags).unwrap().unwrap();
        captured.unwrap();
        for step in 0..20 {
            let draws: Vec<_> = (0..ROWS).map(|row| shard_draw(step, number, row)).collect();
            stream.memcpy_htod(&draws, &mut held).unwrap();
            graph.launch().unwrap();
            nccl.wait(&stream).unwrap();
            let found = stream.clone_dtoh(&held).unwrap();
            stream.synchronize().unwrap();
            nccl.check(&found).unwrap();
            for (row, found) in found.iter().enumerate() {
                let expected = whole_draw(step, world, row);
                assert_eq!(bits(found), bits(&expected), "rank {number} of {world}, step {step}, row {row}");
            }
        }
    };
    thread::scope(|scope| {
        for (number, device) in devices.iter().enumerate() {
            let rank = &rank;
            scope.spawn(move || rank(number, device));
        }
    });
}

/// A graph of each shard's draws and their reduction, replayed with other rows and hidden states.
#[test]
fn a_captured_step_draws_as_one_gpu_does() {
    const REPLAYS: u64 = 10;
    let Some(mut devices) = devices() else { return };
    let _alone = capture_lock();
    // One GPU per shard.
    devices.truncate(3);
    let (id, world) = (NcclId::new().unwrap(), devices.len());
    let expected = steps(0, 1, &devices[0], REPLAYS, None);
    let invalid = expected.iter().flatten().filter(|draw| draw.status != status::DRAWN).count();
    assert_eq!((invalid, expected.windows(2).any(|two| two[0] == two[1])), (REPLAYS as usize, false));
    thread::scope(|scope| {
        for (number, device) in devices.iter().enumerate() {
            let (id, expected) = (&id, &expected);
            scope.spawn(move || {
                let found = steps(number, world, device, REPLAYS, Some(id));
                for (step, (found, expected)) in found.iter().zip(expected).enumerate() {
                    for (row, (found, expected)) in found.iter().zip(expected).enumerate() {
                        assert_eq!(bits(found), bits(expected), "rank {number} of {world}, replay {step}, row {row}");
                    }
                }
            });
        }
    });
}

/// The draws of a rank's steps, by a graph; without an id, the draws of the whole head, one launch per step.
fn steps(number: usize, world: usize, device: &Arc<Device>, replays: u64, id: Option<&NcclId>) -> Vec<Vec<Draw>> {
    let stream = device.stream().unwrap();
    let mut part = Part::new(number, world, device, &stream);
    let (hidden, count) = (part.hidden, rows(0).len());
    let mut nccl = id.map(|id| NcclEndpoint::new(number, world, count, device).unwrap().connect(id, LIMIT).unwrap());
    let (mut held, draws) = (stream.clone_htod(&rows(0)).unwrap(), stream.alloc_zeros(count).unwrap());
    let (rows_at, draws_at) = (DeviceAddress::of(&held, &stream), DeviceAddress::of(&draws, &stream));
    stream.synchronize().unwrap();
    let graph = nccl.as_mut().map(|nccl| {
        stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
        // SAFETY: rows and draws have this size and live until the wait for the last replay; one stream; bare rows.
        let captured = unsafe {
            let drawn = part.tiled.launch(&stream, &hidden, rows_at, draws_at, RowFeatures::Bare);
            drawn.and_then(|_| nccl.launch(&stream, rows_at, draws_at, count))
        };
        let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
        let graph = stream.end_capture(flags).unwrap().unwrap();
        captured.unwrap();
        graph
    });
    let step = |replay| {
        part.renew(replay, &stream);
        stream.memcpy_htod(&rows(replay), &mut held).unwrap();
        match (&graph, &mut nccl) {
            (Some(graph), Some(nccl)) => {
                graph.launch().unwrap();
                nccl.wait(&stream).unwrap();
            }
            // SAFETY: as above.
            _ => unsafe { part.tiled.launch(&stream, &hidden, rows_at, draws_at, RowFeatures::Bare) }.unwrap(),
        }
        let found = stream.clone_dtoh(&draws).unwrap();
        stream.synchronize().unwrap();
        if let Some(nccl) = &nccl {
            nccl.check(&found).unwrap();
        }
        found
    };
    (0..replays).map(step).collect()
}
