//! A head over a `QTensor` has the results of the float64 reference on the dequantized weight, for every type.
#![allow(missing_docs)]

use candle_core::quantized::{GgmlDType, QMatMul, QStorage, QTensor};
use candle_core::{Device, Error, Module, Result, Tensor};
use flash_sampling::backend::canonical::{dot_error_bound, norm};
use flash_sampling::reference::{Reference, ReferenceVariant};
use flash_sampling::{CpuOptions, DType, Head, PerturbedArgmax, Plan, RowParams, RowSample, Samples, round_as_ggml};
use flash_sampling_candle::{FusedHead, HeadOptions, qtensor_matrix, with_matrix};
use std::borrow::Cow;
use std::sync::Arc;

const TYPES: [(GgmlDType, DType); 8] = [
    (GgmlDType::Q8_0, DType::Q8_0),
    (GgmlDType::Q4_0, DType::Q4_0),
    (GgmlDType::Q4K, DType::Q4_K),
    (GgmlDType::Q5K, DType::Q5_K),
    (GgmlDType::Q6K, DType::Q6_K),
    (GgmlDType::BF16, DType::BF16),
    (GgmlDType::F16, DType::F16),
    (GgmlDType::F32, DType::F32),
];
const REFUSED: [GgmlDType; 7] = [
    GgmlDType::Q4_1,
    GgmlDType::Q5_0,
    GgmlDType::Q5_1,
    GgmlDType::Q8_1,
    GgmlDType::Q2K,
    GgmlDType::Q3K,
    GgmlDType::Q8K,
];
/// No multiple of 16: for these weights candle repacks no type.
const VOCAB: usize = 500;
const HIDDEN: usize = 512;
const PLAN: Plan = Plan { max_rows: 6, max_draws: 3, max_logprobs: Some(20), canonical: false };

/// Values between `-size` and `size`.
fn tensor(rows: usize, cols: usize, size: f32, salt: u64) -> Tensor {
    let value = |i: u64| {
        let bits = (i + salt * 0x1_0000_0000).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        ((bits ^ bits >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 40) as f32 / 8_388_608.0 - 1.0
    };
    let values: Vec<f32> = (0..(rows * cols) as u64).map(|i| size * value(i)).collect();
    Tensor::from_vec(values, (rows, cols), &Device::Cpu).unwrap()
}

fn weight(vocab: usize, dtype: GgmlDType) -> Arc<QTensor> {
    Arc::new(QTensor::quantize(&tensor(vocab, HIDDEN, 1.0, 1), dtype).unwrap())
}

fn head(weight: &Arc<QTensor>) -> Result<FusedHead> {
    FusedHead::from_qtensor(weight.clone(), HeadOptions::default(), PLAN, &CpuOptions::default())
}

fn rows() -> [RowParams<'static>; 6] {
    let row = |position| RowParams { seed: 42, position, ..RowParams::default() };
    [
        RowParams { temperature: 0.0, ..row(0) },
        RowParams { draws: 3, ..row(1) },
        RowParams { temperature: 0.7, draws: 3, first_draw: 4, ..row(2) },
        RowParams { top_k: 20, temperature: 1.5, draws: 3, ..row(3) },
        RowParams { min_p: 0.05, top_p: 0.9, draws: 3, ..row(4) },
        RowParams { logprobs: Some(20), ..row(5) },
    ]
}

#[test]
fn blocks_are_read_where_they_lie() {
    for (ggml, dtype) in TYPES {
        let weight = weight(VOCAB, ggml);
        let matrix = qtensor_matrix(&weight).unwrap();
        assert_eq!((matrix.dtype(), matrix.rows(), matrix.cols()), (dtype, VOCAB, HIDDEN));
        assert_eq!(matrix.bytes().as_ptr(), weight.data().unwrap().as_ptr());
        let expected = weight.dequantize(&Device::Cpu).unwrap().to_vec2::<f32>().unwrap();
        let mut row = vec![0.0; HIDDEN];
        for (r, expected) in expected.iter().enumerate() {
            matrix.row_to_f32(r, &mut row);
            assert_eq!(&row, expected, "{ggml:?}, row {r}");
        }
    }
}

#[test]
fn draws_are_those_of_the_reference_on_the_dequantized_weight() {
    let hidden = tensor(6, HIDDEN, 0.25, 7);
    let rows = rows();
    for (ggml, _) in TYPES {
        let weight = weight(VOCAB, ggml);
        let plain = weight.dequantize(&Device::Cpu).unwrap();
        let norms =
            |matrix: &Tensor| -> Vec<f64> { matrix.to_vec2::<f32>().unwrap().iter().map(|row| norm(row)).collect() };
        let (weights, states) = (norms(&plain), norms(&hidden));
        let mut expected = Samples::new();
        with_matrix(&plain, |matrix| {
            let mut reference = Reference::new(Head::new(matrix).unwrap(), PLAN, ReferenceVariant::Tiled);
            with_matrix(&hidden, |hidden| reference.sample(hidden, &rows, &mut expected).map_err(Error::wrap))
        })
        .unwrap();

        let mut head = head(&weight).unwrap();
        let mut batch = Samples::new();
        head.sample(&hidden, &rows, &mut batch).unwrap();
        for (r, row) in rows.iter().enumerate() {
            let mut alone = Samples::new();
            head.sample(&hidden.narrow(0, r, 1).unwrap(), &[*row], &mut alone).unwrap();
            let want = expected.row(r).unwrap();
            for (name, found) in [("in a batch", batch.row(r).unwrap()), ("alone", alone.row(0).unwrap())] {
                let name = format!("{ggml:?}, row {r} {name}");
                let tokens = |row: &RowSample<'_>| row.draws.iter().map(|draw| draw.token).collect::<Vec<_>>();
                assert_eq!(tokens(&found), tokens(&want), "{name}");
                let top = |row: &RowSample<'_>| row.top.iter().map(|(token, _)| *token).collect::<Vec<_>>();
                assert_eq!(top(&found), top(&want), "{name}");
                for (found, want) in found.draws.iter().zip(want.draws) {
                    let inverse = if row.temperature == 0.0 { 1.0 } else { 1.0 / f64::from(row.temperature) };
                    let sum = dot_error_bound(HIDDEN, states[r], weights[want.token as usize]) * inverse;
                    let roundings = 4.0 * f64::from(f32::EPSILON * (want.logit.abs() + want.score.abs()));
                    for (found, want) in [(found.score, want.score), (found.logit, want.logit)] {
                        let apart = f64::from((found - want).abs());
                        assert!(apart <= sum + roundings, "{name}: {found} instead of {want}");
                    }
                }
            }
        }
        // Each row has another token or another score than every other row.
        let first = |r: usize| batch.row(r).unwrap().draws[0].score.to_bits();
        assert!((0..6).all(|a| (0..a).all(|b| first(a) != first(b))));
    }
}

#[test]
fn canonical_draws_have_the_bits_of_the_reference() {
    let hidden = tensor(3, HIDDEN, 0.25, 11);
    let rows = [rows()[0], rows()[1], rows()[2]];
    for (ggml, _) in TYPES {
        let weight = weight(VOCAB, ggml);
        let plan = Plan { canonical: true, ..PLAN };
        let bits = |samples: &Samples| -> Vec<Vec<(u32, u32)>> {
            let row = |row: RowSample<'_>| row.draws.iter().map(|draw| (draw.token, draw.score.to_bits())).collect();
            samples.iter().map(|found| row(found.unwrap())).collect()
        };
        let (mut found, mut expected) = (Samples::new(), Samples::new());
        let head = Head::new(qtensor_matrix(&weight).unwrap()).unwrap();
        let mut reference = Reference::new(head, plan, ReferenceVariant::Tiled);
        with_matrix(&hidden, |hidden| reference.sample(hidden, &rows, &mut expected).map_err(Error::wrap)).unwrap();
        let cpu = CpuOptions::default();
        let mut head = FusedHead::from_qtensor(weight.clone(), HeadOptions::default(), plan, &cpu).unwrap();
        head.sample(&hidden, &rows, &mut found).unwrap();
        assert_eq!(bits(&found), bits(&expected), "{ggml:?}");
    }
}

/// The logits of the 20 most probable tokens.
fn top(head: &mut FusedHead, hidden: &Tensor) -> Vec<(u32, f32)> {
    let mut out = Samples::new();
    head.sample(hidden, &[RowParams { logprobs: Some(20), ..RowParams::default() }], &mut out).unwrap();
    out.row(0).unwrap().top.to_vec()
}

/// The largest difference between our logits and candle's, of the 20 largest, over the bound of the dot product.
fn apart(weight: &Arc<QTensor>, hidden: &Tensor, rounded: DType) -> f64 {
    let candles = QMatMul::QTensor(weight.clone()).forward(hidden).unwrap().flatten_all().unwrap();
    let candles = candles.to_vec1::<f32>().unwrap();
    let mut states = hidden.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    round_as_ggml(rounded, &mut states);
    let weights = weight.dequantize(&Device::Cpu).unwrap().to_vec2::<f32>().unwrap();
    let of_states = norm(&states);
    let states = Tensor::from_vec(states, (1, HIDDEN), &Device::Cpu).unwrap();
    let difference = |(token, logit): (u32, f32)| {
        let token = token as usize;
        f64::from((logit - candles[token]).abs()) / dot_error_bound(HIDDEN, of_states, norm(&weights[token]))
    };
    top(&mut head(weight).unwrap(), &states).into_iter().map(difference).fold(0.0, f64::max)
}

#[test]
fn candles_logits_are_those_of_rounded_hidden_states() {
    let hidden = tensor(1, HIDDEN, 0.25, 9);
    for (ggml, dtype) in TYPES.into_iter().filter(|(_, dtype)| !dtype.is_float()) {
        let weight = weight(VOCAB, ggml);
        let (rounded, plain) = (apart(&weight, &hidden, dtype), apart(&weight, &hidden, DType::F32));
        println!("{ggml:?}: rounded {rounded}, plain {plain}");
        assert!(rounded <= 1.0, "{ggml:?}: {rounded}");
        // The negative control: candle's logits are not the dot products.
        assert!(plain > 1.0, "{ggml:?}: {plain}");
    }
    // With VNNI candle repacks these weights. Then the blocks of the hidden state have 256 elements.
    let weight = weight(VOCAB.next_multiple_of(16), GgmlDType::Q8_0);
    let [short, long] = [DType::Q8_0, DType::Q6_K].map(|rounded| apart(&weight, &hidden, rounded));
    println!("Q8_0, repacked: blocks of 32 {short}, blocks of 256 {long}");
    assert!((short <= 1.0) != (long <= 1.0), "{short} {long}");
}

#[test]
fn the_head_keeps_the_blocks_of_the_model() {
    fn is_send<T: Send + Sync>(_: &T) {}
    let weight = weight(VOCAB, GgmlDType::Q6K);
    let hidden = tensor(1, HIDDEN, 0.25, 3);
    let options = HeadOptions { vocab_size: Some(490), scale: Some(0.5), ..HeadOptions::default() };
    let layer = QMatMul::QTensor(weight.clone());
    let mut head = FusedHead::from_qmatmul(&layer, options, PLAN, &CpuOptions::default()).unwrap();
    is_send(&head);
    assert_eq!((head.vocab_size(), Arc::strong_count(&weight)), (490, 3));
    let row = RowParams { draws: 3, ..RowParams::default() };
    let before = head.draw(&hidden, &[row]).unwrap().to_vec2::<u32>().unwrap();
    drop((layer, weight));
    assert_eq!(head.draw(&hidden, &[row]).unwrap().to_vec2::<u32>().unwrap(), before);
}

fn error(weight: QTensor) -> String {
    let layer = QMatMul::QTensor(Arc::new(weight));
    FusedHead::from_qmatmul(&layer, HeadOptions::default(), PLAN, &CpuOptions::default()).unwrap_err().to_string()
}

fn zeros(dtype: GgmlDType, elements: usize, dims: &[usize]) -> QTensor {
    QTensor::new(QStorage::Cpu(dtype.cpu_zeros(elements)), dims).unwrap()
}

#[test]
fn other_types_and_shapes_are_refused() {
    for dtype in REFUSED {
        let message = error(zeros(dtype, 512 * 4, &[4, 512]));
        assert!(message.contains(&format!("{dtype:?}")), "{message}");
    }
    for dims in [&[512 * 4][..], &[1, 4, 512], &[5, 512], &[3, 512]] {
        let message = error(zeros(GgmlDType::Q8_0, 512 * 4, dims));
        assert!(message.contains("shape") || message.contains("rank") || message.contains("512"), "{message}");
    }
    assert!(head(&Arc::new(zeros(GgmlDType::Q8_0, 512 * 4, &[4, 512]))).is_ok());
    let mut head = head(&weight(VOCAB, GgmlDType::Q8_0)).unwrap();
    let row = RowParams::default();
    assert!(head.draw(&tensor(1, HIDDEN - 32, 0.25, 1), &[row]).is_err());
    assert!(head.draw(&tensor(7, HIDDEN, 0.25, 1), &[row; 7]).is_err());
    assert!(head.draw(&tensor(1, HIDDEN, 0.25, 1), &[row]).is_ok());
}

#[test]
fn a_scale_that_is_not_finite_is_an_error_with_the_token() {
    let weight = weight(VOCAB, GgmlDType::Q8_0);
    let mut bytes = weight.data().unwrap().into_owned();
    bytes[321 * HIDDEN / 32 * 34..][..2].copy_from_slice(&0x7e00u16.to_le_bytes());
    let storage = QStorage::from_data(Cow::Owned(bytes), &Device::Cpu, GgmlDType::Q8_0).unwrap();
    let weight = Arc::new(QTensor::new(storage, (VOCAB, HIDDEN)).unwrap());
    let message = head(&weight).unwrap().draw(&tensor(1, HIDDEN, 0.25, 1), &[RowParams::default()]);
    let message = message.unwrap_err().to_string();
    assert!(message.contains("321") && message.contains("NaN"), "{message}");
}
