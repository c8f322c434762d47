//! Device memory of any layout, and stored logits.

use super::backends::gpu::{CHOICES, Gpu};
use super::backends::gpu_memory::{POISON, bits};
use flash_sampling_conformance::problem::{Problem, Size};
use flash_sampling_conformance::suite::drop_outside_captures;
use flash_sampling_conformance::tensor::Tensor;
use flash_sampling_core::backend::RowTransform;
use flash_sampling_core::{DType, HeadError};
use flash_sampling_cuda::DeviceAddress;
use flash_sampling_cuda::cudarc::driver::{CudaSlice, CudaStream};
use flash_sampling_cuda::{CudaError, DeviceHead, DeviceMatrix, DeviceTiled, KernelChoice, RowFeatures, abi};
use std::sync::Arc;

/// A matrix on the GPU. It begins `before` bytes into its memory, and has `gap` elements of NaN after each row.
struct There {
    _memory: CudaSlice<u8>,
    matrix: DeviceMatrix,
}

impl There {
    fn new(tensor: &Tensor, before: usize, gap: usize, stream: &Arc<CudaStream>) -> There {
        let (bytes, row_stride) = tensor.strided(before, gap);
        let memory = stream.clone_htod(&bytes).unwrap();
        let address = DeviceAddress::of(&memory, stream).add(before);
        let (dtype, rows, cols) = (tensor.matrix().dtype(), tensor.rows(), tensor.cols());
        There { _memory: memory, matrix: DeviceMatrix { address, dtype, rows, cols, row_stride } }
    }
}

const FIRST_TOKEN: u32 = 6;
const GAP: usize = 5;
const FILL: u8 = 0xff;

fn head(weight: DeviceMatrix) -> DeviceHead {
    DeviceHead { first_token: FIRST_TOKEN, ..DeviceHead::of(weight) }
}

/// Returns random rows at several temperatures, and greedy rows.
fn rows(count: usize) -> Vec<abi::Row> {
    let row = |r: usize| abi::Row {
        seed: 3 + r as u64,
        position: 1 << 33 | r as u64,
        inv_temperature: [1.0, 0.25, 1.0, 2.5][r % 4],
        greedy: (r % 4 == 2).into(),
        ..abi::Row::default()
    };
    (0..count).map(row).collect()
}

/// Draws into poisoned memory; with `logits`, also stores logits there.
fn draws(
    sampler: &mut DeviceTiled,
    hidden: &DeviceMatrix,
    logits: Option<&CudaSlice<u8>>,
    stream: &Arc<CudaStream>,
) -> Vec<abi::Draw> {
    let rows = stream.clone_htod(&rows(hidden.rows)).unwrap();
    let mut out = stream.clone_htod(&vec![POISON; hidden.rows]).unwrap();
    let rows_at = DeviceAddress::of(&rows, stream);
    // Two calls, so state that a call leaves in the scratch changes the result.
    for _ in 0..2 {
        stream.memcpy_htod(&vec![POISON; hidden.rows], &mut out).unwrap();
        let out_at = DeviceAddress::of(&out, stream);
        match logits {
            // SAFETY: all memory is on this device, has the stated sizes, and is freed after a wait for the stream.
            None => unsafe { sampler.launch(stream, hidden, rows_at, out_at, RowFeatures::Any) }.unwrap(),
            Some(logits) => {
                let stride = logits.len() / 4 / hidden.rows;
                let logits = DeviceAddress::of(logits, stream).cast();
                // SAFETY: as above.
                unsafe { sampler.launch_storing(stream, hidden, rows_at, out_at, logits, stride) }.unwrap();
            }
        }
    }
    let found = stream.clone_dtoh(&out).unwrap();
    stream.synchronize().unwrap();
    found
}

#[test]
fn every_layout_of_device_memory_and_every_kernel_gives_the_same_bits() {
    let Some((device, stream)) = Gpu::TILED.with_stream() else { return };
    // Bytes before the matrix and elements between rows, for the weight and the hidden states. Rows have 193 elements.
    let layouts = [
        [(0, 7), (0, 7)],
        [(0, 0), (0, 0)],
        [(2, 7), (0, 7)],
        [(0, 7), (2, 7)],
        [(4, 1), (8, 3)],
        [(8, 15), (4, 7)],
        [(16, 15), (6, 0)],
    ];
    for dtype in [DType::BF16, DType::F16] {
        for (count, tokens) in [(3, 1003), (20, 3001), (70, 517), (256, 2050)] {
            let problem = Problem::gaussian(Size::new(count, tokens, 193), dtype, dtype, 5 + count as u64);
            let mut want = Vec::new();
            for [of_weight, of_hidden] in layouts {
                let weight = There::new(&problem.weight, of_weight.0, of_weight.1, &stream);
                let hidden = There::new(&problem.hidden, of_hidden.0, of_hidden.1, &stream);
                stream.synchronize().unwrap();
                for choice in CHOICES {
                    // SAFETY: the weight outlives the sampler's launches.
                    let sampler = unsafe { DeviceTiled::with_kernels(head(weight.matrix), count, &device, choice) };
                    let mut sampler = sampler.unwrap();
                    let found = bits(&draws(&mut sampler, &hidden.matrix, None, &stream));
                    drop_outside_captures(sampler);
                    if want.is_empty() {
                        assert!(found.iter().all(|draw| draw.0 == abi::status::DRAWN), "{found:?}");
                        want = found;
                        continue;
                    }
                    let what = format!("{} {count} x {tokens}, {of_weight:?} {of_hidden:?} {choice:?}", dtype.name());
                    let first = (0..count).find(|&r| found[r] != want[r]);
                    let pair = first.map(|r| (r, found[r], want[r]));
                    assert!(pair.is_none(), "{what}: row, found, wanted {pair:?}");
                }
            }
        }
    }
}

#[test]
fn stored_logits_are_those_of_the_plain_sum_and_nothing_else_is_written() {
    let Some((device, stream)) = Gpu::TILED.with_stream() else { return };
    use DType::{BF16, F16, F32};
    for (count, tokens, hidden) in [(1, 1, 1), (5, 700, 130), (33, 1111, 64), (130, 257, 40), (256, 300, 96)] {
        for (of_weight, of_hidden) in [(BF16, BF16), (F16, F16), (F32, F32), (BF16, F32), (F32, F16), (F16, BF16)] {
            let problem = Problem::integers(Size::new(count, tokens, hidden), of_weight, of_hidden, 9);
            let weight = There::new(&problem.weight, 0, 0, &stream);
            let states = There::new(&problem.hidden, 0, 0, &stream);
            stream.synchronize().unwrap();
            let parameters = rows(count);
            let plain: Vec<Vec<f32>> = (0..tokens).map(|t| problem.weight.row(t)).collect();
            for choice in [KernelChoice::Fastest, KernelChoice::PortableUnaligned] {
                // SAFETY: the weight outlives the sampler's launches.
                let sampler = unsafe { DeviceTiled::with_kernels(head(weight.matrix), count, &device, choice) };
                let mut sampler = sampler.unwrap();
                let logits = stream.clone_htod(&vec![FILL; 4 * count * (tokens + GAP)]).unwrap();
                let storing = draws(&mut sampler, &states.matrix, Some(&logits), &stream);
                let drawing = draws(&mut sampler, &states.matrix, None, &stream);
                let what = format!("{count} x {tokens} x {hidden}, {} x {}", of_weight.name(), of_hidden.name());
                assert_eq!(bits(&storing), bits(&drawing), "{what}");
                let found = stream.clone_dtoh(&logits).unwrap();
                stream.synchronize().unwrap();
                drop_outside_captures(sampler);
                let found: Vec<u32> = found.as_chunks::<4>().0.iter().map(|b| u32::from_ne_bytes(*b)).collect();
                for r in 0..count {
                    let state = problem.hidden.row(r);
                    let dot = |row: &Vec<f32>| row.iter().zip(&state).fold(0.0f32, |sum, (w, h)| sum + w * h);
                    let mut want: Vec<f32> = plain.iter().map(dot).collect();
                    let inv_temperature = parameters[r].inv_temperature;
                    RowTransform { mask: None, adjustments: &[], inv_temperature }.apply(FIRST_TOKEN, &mut want);
                    let stored = &found[r * (tokens + GAP)..][..tokens + GAP];
                    let bad = (0..tokens).find(|&t| f32::from_bits(stored[t]) != want[t]);
                    let pair = bad.map(|t| (t, f32::from_bits(stored[t]), want[t]));
                    assert!(pair.is_none(), "{what} {choice:?}, row {r}: token, found, wanted {pair:?}");
                    assert!(stored[tokens..].iter().all(|&bits| bits == !0), "{what} {choice:?}, row {r}: beyond");
                }
            }
        }
    }
}

#[test]
fn nonsense_is_refused() {
    let Some((device, stream)) = Gpu::TILED.with_stream() else { return };
    let problem = Problem::integers(Size::new(2, 40, 16), DType::BF16, DType::BF16, 1);
    let (weight, hidden) = (There::new(&problem.weight, 0, 0, &stream), There::new(&problem.hidden, 0, 0, &stream));
    stream.synchronize().unwrap();
    let plan = |weight| {
        // SAFETY: the weight outlives the sampler, which is not used.
        unsafe { DeviceTiled::new(head(weight), 2, &device) }.err()
    };
    for wrong in [
        DeviceMatrix { cols: 0, ..weight.matrix },
        DeviceMatrix { row_stride: 15, ..weight.matrix },
        DeviceMatrix { address: weight.matrix.address.add(1), ..weight.matrix },
    ] {
        assert!(matches!(plan(wrong), Some(CudaError::Layout { what: "weight", .. })), "{wrong:?}");
    }
    let good = head(weight.matrix);
    let plan = |head| {
        // SAFETY: as above.
        unsafe { DeviceTiled::new(head, 2, &device) }.err()
    };
    for value in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        let error = plan(DeviceHead { scale: value, ..good });
        let found = matches!(error, Some(CudaError::Head(HeadError::Factor { what: "scale", .. })));
        assert!(found, "scale {value}: {error:?}");
        let error = plan(DeviceHead { soft_cap: Some(value), ..good });
        let found = matches!(error, Some(CudaError::Head(HeadError::Factor { what: "soft_cap", .. })));
        assert!(found, "soft-cap {value}: {error:?}");
    }
    // 40 tokens: the last id would be 2^32 - 1, and then 2^32 - 2.
    let error = plan(DeviceHead { first_token: u32::MAX - 39, ..good });
    assert!(matches!(error, Some(CudaError::Head(HeadError::Vocab { .. }))), "{error:?}");
    let error = plan(DeviceHead { bias: Some(weight.matrix.address.add(2).cast()), ..good });
    assert!(matches!(error, Some(CudaError::Layout { what: "bias", .. })), "{error:?}");
    assert_eq!(plan(good), None);
    // SAFETY: all launches below are refused, so nothing reads the memory.
    let mut sampler = unsafe { DeviceTiled::new(head(weight.matrix), 2, &device) }.unwrap();
    for wrong in [DeviceMatrix { cols: 8, ..hidden.matrix }, DeviceMatrix { row_stride: 3, ..hidden.matrix }] {
        // SAFETY: as above.
        let refused =
            unsafe { sampler.launch(&stream, &wrong, DeviceAddress::NULL, DeviceAddress::NULL, RowFeatures::Any) };
        assert!(matches!(refused, Err(CudaError::Layout { what: "hidden states", .. })), "{wrong:?}");
    }
    let (rows, draws, logits) = (DeviceAddress::NULL, DeviceAddress::NULL, DeviceAddress::new(4096));
    // SAFETY: as above.
    let refused = unsafe { sampler.launch_storing(&stream, &hidden.matrix, rows, draws, logits, 39) };
    assert!(matches!(refused, Err(CudaError::Layout { what: "logits", .. })));
}
