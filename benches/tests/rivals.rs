//! The reads and the rivals on a GPU compute correct results. Skipped without a GPU, unless `FLASH_SAMPLING_REQUIRE`
//! names cuda.
#![cfg(feature = "cuda")]

use cudarc::driver::{CudaSlice, CudaStream};
use flash_sampling::DType;
use flash_sampling::cuda::DeviceAddress;
use flash_sampling::cuda::{Architecture, Device, DeviceMatrix, compiler};
use flash_sampling_benches::gpu::read::{Read, ReadKernel, machine_code};
use flash_sampling_benches::rivals::{InverseCdf, Matmul};
use std::io::Write;
use std::sync::Arc;

fn device() -> Option<Arc<Device>> {
    let required = std::env::var("FLASH_SAMPLING_REQUIRE").is_ok_and(|words| words.split(',').any(|w| w == "cuda"));
    match Device::new(0) {
        Ok(device) => Some(device),
        Err(error) if required => panic!("{error}"),
        Err(error) => {
            // The test harness captures the output of print macros, but not this write.
            let _ = writeln!(std::io::stderr(), "skipped: 1 test of rivals: {error}");
            None
        }
    }
}

/// Truncates to bf16, which is exact for values that bf16 holds.
fn bf16(value: f32) -> u16 {
    (value.to_bits() >> 16) as u16
}

fn matrix(held: &CudaSlice<u16>, stream: &Arc<CudaStream>, rows: usize, cols: usize) -> DeviceMatrix {
    DeviceMatrix { address: DeviceAddress::of(held, stream).cast(), dtype: DType::BF16, rows, cols, row_stride: cols }
}

/// Counts the tokens that `calls` calls of `rows` equal rows draw.
fn counts(logits: &[f32], rows: usize, calls: u64, device: &Device) -> Vec<u64> {
    let (stream, vocab) = (device.context().new_stream().unwrap(), logits.len());
    let stride = vocab.next_multiple_of(8);
    let row = logits.iter().map(|&l| bf16(l)).chain(std::iter::repeat_n(bf16(99.0), stride - vocab));
    let row: Vec<u16> = row.collect();
    let held = stream.clone_htod(&row.repeat(rows)).unwrap();
    let logits = DeviceMatrix { cols: vocab, ..matrix(&held, &stream, rows, stride) };
    let mut sampler = InverseCdf::new(DType::BF16, rows, device).unwrap();
    let mut counts = vec![0u64; vocab];
    for position in 0..calls {
        let positions = stream.clone_htod(&vec![position; rows]).unwrap();
        let tokens = stream.clone_htod(&vec![u32::MAX; rows]).unwrap();
        let (from, to) = (DeviceAddress::of(&positions, &stream), DeviceAddress::of(&tokens, &stream));
        // SAFETY: the rows of logits, positions and tokens were just allocated; the code below waits for the stream.
        unsafe { sampler.launch(&stream, &logits, 1.0, from.get(), to.get()) }.unwrap();
        stream.clone_dtoh(&tokens).unwrap().iter().for_each(|&token| counts[token as usize] += 1);
    }
    counts
}

/// Pearson's statistic against the softmax, and its degrees of freedom.
fn chi_square(logits: &[f32], counts: &[u64]) -> (f64, usize) {
    let weights: Vec<f64> = logits.iter().map(|&l| f64::from(f32::from_bits(u32::from(bf16(l)) << 16)).exp()).collect();
    let (mass, draws) = (weights.iter().sum::<f64>(), counts.iter().sum::<u64>() as f64);
    let mut statistic = 0.0;
    for (&weight, &count) in weights.iter().zip(counts).filter(|(weight, _)| **weight > 0.0) {
        let expected = draws * weight / mass;
        statistic += (count as f64 - expected).powi(2) / expected;
    }
    (statistic, weights.iter().filter(|weight| **weight > 0.0).count() - 1)
}

#[test]
fn inverse_cdf_draws_from_the_softmax() {
    let Some(device) = device() else { return };
    let few: Vec<f32> = (0..37).map(|i| (i * 7 % 11) as f32 * 0.25).collect();
    // Mass in the first, a middle and the last part, at both of their ends, and none between.
    let mut many = vec![f32::NEG_INFINITY; 151_936];
    for (token, logit) in [(0, 1.0), (2047, 0.5), (2048, 0.0), (70_001, 1.5), (131_071, 0.25), (151_935, 1.0)] {
        many[token] = logit;
    }
    for (logits, rows, calls) in [(&few, 256, 40), (&few, 5, 2000), (&many, 1, 4000), (&many, 256, 40)] {
        let counts = counts(logits, rows, calls, &device);
        let (statistic, freedom) = chi_square(logits, &counts);
        // Alpha is 1e-4 for each of the four: within 3.8 standard deviations, by the normal approximation of Wilson and
        // Hilferty.
        let f = freedom as f64;
        let limit = f * (1.0 - 2.0 / (9.0 * f) + 3.8 * (2.0 / (9.0 * f)).sqrt()).powi(3);
        assert!(statistic < limit, "{} tokens, {rows} rows: {statistic} of {freedom}", logits.len());
        // The negative control: the law of the reversed logits.
        let (statistic, _) = chi_square(&logits.iter().rev().copied().collect::<Vec<_>>(), &counts);
        assert!(statistic > limit, "{} tokens, {rows} rows: {statistic} of {freedom}", logits.len());
        let outside = logits.iter().zip(&counts).filter(|(l, count)| **l == f32::NEG_INFINITY && **count > 0).count();
        assert_eq!(outside, 0);
    }
}

#[test]
fn the_product_is_hidden_times_the_weight_transposed() {
    let Some(device) = device() else { return };
    let stream = device.context().new_stream().unwrap();
    let Some(matmul) = Matmul::new(&stream).unwrap() else {
        let _ = writeln!(std::io::stderr(), "skipped: 1 test of rivals: libcublas cannot be loaded");
        return;
    };
    let (rows, vocab, cols) = (3, 24, 16);
    let value = |i: usize, salt: usize| ((i * salt + 3) % 5) as f32 - 2.0;
    let weight: Vec<f32> = (0..vocab * cols).map(|i| value(i, 7)).collect();
    let hidden: Vec<f32> = (0..rows * cols).map(|i| value(i, 3)).collect();
    let upload = |values: &[f32]| stream.clone_htod(&values.iter().map(|&v| bf16(v)).collect::<Vec<_>>()).unwrap();
    let (w, h, out) = (upload(&weight), upload(&hidden), upload(&vec![99.0; rows * vocab]));
    // SAFETY: the matrices and the output have these sizes.
    unsafe {
        let (w, h) = (matrix(&w, &stream, vocab, cols), matrix(&h, &stream, rows, cols));
        matmul.launch(&w, &h, DeviceAddress::of(&out, &stream).get()).unwrap();
    }
    let found = stream.clone_dtoh(&out).unwrap();
    for r in 0..rows {
        for t in 0..vocab {
            let dot: f32 = (0..cols).map(|k| hidden[r * cols + k] * weight[t * cols + k]).sum();
            assert_eq!(found[r * vocab + t], bf16(dot), "row {r}, token {t}");
        }
    }
}

#[test]
fn every_kernel_of_the_benchmarks_compiles() {
    if compiler().is_none() && !std::env::var("FLASH_SAMPLING_REQUIRE").is_ok_and(|words| words.contains("nvrtc")) {
        let _ = writeln!(std::io::stderr(), "skipped: 1 test of rivals: libnvrtc cannot be loaded");
        return;
    }
    let sources = [
        (include_str!("../src/gpu/read.cu"), None),
        (include_str!("../src/rivals/softmax.cu"), Some("--define-macro=FS_TYPE=0")),
        (include_str!("../src/rivals/softmax.cu"), Some("--define-macro=FS_TYPE=1")),
    ];
    for architecture in Architecture::USUAL {
        for (source, option) in sources {
            assert!(machine_code(source, option.as_slice(), architecture).unwrap().starts_with(b"\x7fELF"));
        }
    }
}

#[test]
fn reads_of_any_length_run() {
    let Some(device) = device() else { return };
    let stream = device.context().new_stream().unwrap();
    let memory = stream.alloc_zeros::<u8>(50_000_000).unwrap();
    let address = DeviceAddress::of(&memory, &stream);
    for read in
        [ReadKernel::Streaming, ReadKernel::Bulk].into_iter().filter_map(|kernel| Read::new(kernel, &device).unwrap())
    {
        for bytes in [0, 16, 16_384, 16_400, 49_999_984] {
            // SAFETY: the bytes are within the allocation.
            unsafe { read.launch(&stream, address.get(), bytes) }.unwrap();
            stream.synchronize().unwrap();
        }
    }
}
