//! The fused head over tensors on a GPU has the results of the head over the same tensors on the CPU. Sums of small
//! integers are exact, so all bits agree.
#![cfg(feature = "cuda")]
#![allow(missing_docs)]

use candle_core::quantized::{GgmlDType, QMatMul, QTensor};
use candle_core::{DType, Device, Tensor};
use flash_sampling::{CpuOptions, History, Plan, RowParams, Samples};
use flash_sampling_candle::{FusedHead, HeadOptions, LogitsProcessor};

const VOCAB: usize = 1200;
const HIDDEN: usize = 48;

fn gpu() -> Option<Device> {
    match Device::new_cuda(0) {
        Ok(device) => Some(device),
        Err(error) => {
            let required = std::env::var("FLASH_SAMPLING_REQUIRE").unwrap_or_default();
            assert!(!required.split(',').any(|word| word == "cuda"), "{error}, but FLASH_SAMPLING_REQUIRE names cuda");
            println!("skipped: {error}");
            None
        }
    }
}

/// Integers from -3 to 3.
fn integers(rows: usize, cols: usize, salt: usize, dtype: DType) -> Tensor {
    let value = |i: usize| ((i * 7919 + salt * 104_729) % 1009 % 7) as f32 - 3.0;
    let values: Vec<f32> = (0..rows * cols).map(value).collect();
    Tensor::from_vec(values, (rows, cols), &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
}

fn options() -> HeadOptions {
    let bias = Some((0..VOCAB).map(|i| (i % 5) as f32 - 2.0).collect());
    HeadOptions { vocab_size: Some(VOCAB - 7), bias, scale: Some(0.125), ..HeadOptions::default() }
}

/// The results of each row as text: tokens, bits of scores and logits, log-probabilities, or the error.
fn said(samples: &Samples) -> Vec<String> {
    let row = |row: Result<flash_sampling::RowSample<'_>, flash_sampling::RowError>| match row {
        Ok(row) => {
            let bits = |x: f32| x.to_bits();
            let draws: Vec<_> = row.draws.iter().map(|d| (d.token, bits(d.score), bits(d.logit))).collect();
            let top: Vec<_> = row.top.iter().map(|&(token, logit)| (token, bits(logit))).collect();
            let kept = row.kept.map(|kept| (kept.count, kept.tokens.to_vec()));
            // The order of summation differs, so log Z is rounded.
            let log_z = row.log_z.map(|z| (z * 1e4).round());
            format!("{draws:?} {log_z:?} {top:?} {kept:?}")
        }
        Err(error) => format!("{error:?}"),
    };
    samples.iter().map(row).collect()
}

/// Rows of every kind.
fn with_rows<R>(work: impl FnOnce(&[RowParams<'_>]) -> R) -> R {
    let mask: Vec<u32> = (0..VOCAB.div_ceil(32) as u32).map(|i| i.wrapping_mul(0x9e37_79b9) | 1).collect();
    let history = History::new(&[3, 700, 700, 44]);
    let row = |position| RowParams { seed: 42, position, ..RowParams::default() };
    work(&[
        row(0),
        RowParams { temperature: 0.0, ..row(1) },
        RowParams { temperature: 0.7, draws: 3, first_draw: 5, ..row(2) },
        RowParams { top_k: 20, ..row(3) },
        RowParams { temperature: -1.0, ..row(4) },
        RowParams { top_p: 0.8, min_p: 0.01, draws: 2, ..row(5) },
        RowParams { mask: Some(&mask), logit_bias: &[(7, 2.0), (900, f32::NEG_INFINITY)], ..row(6) },
        RowParams { history: Some(&history), repetition_penalty: 1.5, frequency_penalty: 0.25, ..row(7) },
        RowParams { logprobs: Some(3), ..row(8) },
        RowParams { without_replacement: true, draws: 4, logprobs: Some(0), ..row(9) },
        RowParams { typical_p: 0.9, ..row(10) },
        RowParams { mask: Some(&[]), ..row(11) },
        RowParams { top_k: 5, kept: true, ..row(12) },
    ])
}

#[test]
fn draws_of_bf16_are_those_of_the_cpu() {
    compare(DType::BF16);
}

#[test]
fn draws_of_f16_are_those_of_the_cpu() {
    compare(DType::F16);
}

#[test]
fn draws_of_f32_are_those_of_the_cpu() {
    compare(DType::F32);
}

/// Compares CPU and GPU for a weight alone, and for one inside a wider tensor, at an address that no fast kernel
/// supports. Hidden states are row-major or column-major.
fn compare(dtype: DType) {
    let Some(gpu) = gpu() else { return };
    let wide = integers(VOCAB, HIDDEN + 8, 1, dtype);
    let mut differences = 0;
    with_rows(|rows| {
        let plan = Plan { max_rows: rows.len(), max_draws: 4, max_logprobs: Some(3), ..Plan::default() };
        let states = integers(rows.len(), HIDDEN, 2, dtype);
        for (name, at) in [("strided", 0), ("unaligned", 1), ("contiguous", 8)] {
            let sampled = |device: &Device| {
                let weight = wide.to_device(device).unwrap().narrow(1, at, HIDDEN).unwrap();
                let weight = if name == "contiguous" { weight.contiguous().unwrap() } else { weight };
                let mut head = FusedHead::new(weight, options(), plan, &CpuOptions::default()).unwrap();
                let mut out = Samples::new();
                let hidden = states.to_device(device).unwrap();
                head.sample(&hidden, rows, &mut out).unwrap();
                let first = said(&out);
                // The second call reuses the memory of the first.
                head.sample(&hidden.t().unwrap().contiguous().unwrap().t().unwrap(), rows, &mut out).unwrap();
                assert_eq!(first, said(&out), "{name}: hidden states column by column");
                first
            };
            let (expected, found) = (sampled(&Device::Cpu), sampled(&gpu));
            assert_eq!((expected.len(), found.len()), (rows.len(), rows.len()));
            for (r, (expected, found)) in expected.iter().zip(&found).enumerate() {
                if expected != found {
                    differences += 1;
                    println!("{dtype:?}, {name}, row {r}:\n  CPU {expected}\n  GPU {found}");
                }
            }
        }
    });
    assert_eq!(differences, 0);
}

#[test]
fn tokens_stay_on_the_device_in_any_number_of_rows() {
    let Some(gpu) = gpu() else { return };
    let weight = integers(VOCAB, HIDDEN, 3, DType::BF16);
    let plan = Plan { max_rows: 600, max_draws: 2, ..Plan::default() };
    for count in [1, 8, 256, 257, 600] {
        let hidden = integers(count, HIDDEN, 4, DType::BF16);
        let row = |r| RowParams { seed: r, position: 9, draws: 2, ..RowParams::default() };
        let rows: Vec<_> = (0..count as u64).map(row).collect();
        let drawn = |device: &Device| {
            let weight = weight.to_device(device).unwrap();
            let mut head = FusedHead::new(weight, HeadOptions::default(), plan, &CpuOptions::default()).unwrap();
            head.draw(&hidden.to_device(device).unwrap(), &rows).unwrap()
        };
        let found = drawn(&gpu);
        assert!(found.device().same_device(&gpu) && found.dims() == [count, 2] && found.dtype() == DType::U32);
        assert_eq!(found.to_vec2::<u32>().unwrap(), drawn(&Device::Cpu).to_vec2::<u32>().unwrap(), "{count} rows");
    }
}

#[test]
fn what_cannot_be_drawn_from_is_an_error() {
    let Some(gpu) = gpu() else { return };
    let weight = integers(VOCAB, HIDDEN, 3, DType::BF16).to_device(&gpu).unwrap();
    let new = |weight: &Tensor, options: HeadOptions, plan: Plan| {
        FusedHead::new(weight.clone(), options, plan, &CpuOptions::default()).map_err(|error| error.to_string())
    };
    let plan = Plan { max_rows: 2, ..Plan::default() };
    let usual = HeadOptions::default;
    assert!(new(&weight, HeadOptions { vocab_size: Some(VOCAB + 1), ..usual() }, plan).is_err());
    assert!(new(&weight, HeadOptions { bias: Some(vec![0.0; 3]), ..usual() }, plan).is_err());
    assert!(new(&weight, HeadOptions { scale: Some(f32::NAN), ..usual() }, plan).is_err());
    assert!(new(&weight.t().unwrap(), usual(), plan).unwrap_err().contains("contiguous"));
    assert!(new(&weight, usual(), Plan { canonical: true, ..plan }).is_err());
    let mut head = new(&weight, usual(), plan).unwrap();
    let row = RowParams::default();
    let hidden = |rows, cols| integers(rows, cols, 5, DType::BF16);
    assert!(head.draw(&hidden(1, HIDDEN), &[row]).is_err(), "hidden states on the CPU");
    assert!(head.draw(&hidden(1, HIDDEN - 1).to_device(&gpu).unwrap(), &[row]).is_err());
    assert!(head.draw(&hidden(3, HIDDEN).to_device(&gpu).unwrap(), &[row; 3]).is_err());
    let one = hidden(1, HIDDEN).to_device(&gpu).unwrap();
    assert!(head.draw(&one, &[RowParams { temperature: -1.0, ..row }]).is_err());
    assert!(head.draw(&one, &[row]).is_ok());
    assert!(FusedHead::from_qmatmul(&QMatMul::Tensor(weight), usual(), plan, &CpuOptions::default()).is_ok());
    // Matrices of mixed types are multiplied without tensor cores.
    let float = one.to_dtype(DType::F32).unwrap();
    let (a, b) = (head.draw(&float, &[row]).unwrap(), head.draw(&one, &[row]).unwrap());
    assert_eq!(a.to_vec2::<u32>().unwrap(), b.to_vec2::<u32>().unwrap());
}

#[test]
fn a_quantised_head_is_on_the_cpu() {
    let Some(gpu) = gpu() else { return };
    let values = integers(64, 32, 7, DType::F32);
    let new = |weight: QTensor| {
        let layer = QMatMul::QTensor(weight.into());
        FusedHead::from_qmatmul(&layer, HeadOptions::default(), Plan::default(), &CpuOptions::default())
    };
    let refused = new(QTensor::quantize_onto(&values, GgmlDType::Q8_0, &gpu).unwrap());
    let message = refused.unwrap_err().to_string();
    assert!(message.contains("QTensor on Cuda"), "{message}");
    let mut head = new(QTensor::quantize(&values, GgmlDType::Q8_0).unwrap()).unwrap();
    let (hidden, row) = (integers(1, 32, 8, DType::F32), RowParams::default());
    assert!(head.draw(&hidden.to_device(&gpu).unwrap(), &[row]).is_err(), "hidden states on a GPU");
    assert!(head.draw(&hidden, &[row]).is_ok());
}

#[test]
fn a_processor_takes_logits_on_the_device() {
    let Some(gpu) = gpu() else { return };
    let logits = integers(1, VOCAB, 6, DType::F32).flatten_all().unwrap();
    let tokens = |logits: &Tensor| {
        let mut processor = LogitsProcessor::new(11, Some(0.8), Some(0.9));
        (0..20).map(|_| processor.sample(logits).unwrap()).collect::<Vec<_>>()
    };
    assert_eq!(tokens(&logits), tokens(&logits.to_device(&gpu).unwrap()));
    // The same draws by a head.
    let (weight, hidden) = (integers(VOCAB, HIDDEN, 3, DType::F32), integers(1, HIDDEN, 4, DType::F32));
    let drawn = |device: &Device| {
        let (weight, hidden) = (weight.to_device(device).unwrap(), hidden.to_device(device).unwrap());
        let mut head = FusedHead::new(weight, HeadOptions::default(), Plan::default(), &CpuOptions::default()).unwrap();
        let mut processor = LogitsProcessor::new(11, Some(8.0), Some(0.9));
        (0..20).map(|_| processor.sample_head(&mut head, &hidden).unwrap()).collect::<Vec<_>>()
    };
    assert_eq!(drawn(&gpu), drawn(&Device::Cpu));
}
