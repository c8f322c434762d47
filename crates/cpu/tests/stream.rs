//! Compares draws of the streamed head with the head in memory, and checks the position at which a short reader ended.

use flash_sampling_core::{
    DType, Head, Matrix, PerturbedArgmax, Plan, RowError, RowParams, Samples, StreamError, StreamHead,
};
use flash_sampling_cpu::{CpuError, CpuOptions, Online, OnlineStream};
use half::bf16;

const VOCAB: usize = 1000;
const HIDDEN: usize = 37;
const ROWS: usize = 3;

fn matrix(rows: usize, salt: usize) -> Vec<bf16> {
    let value = |i: usize| ((i * 7919 + salt) % 1009) as f32 / 504.5 - 1.0;
    (0..rows * HIDDEN).map(|i| bf16::from_f32(value(i))).collect()
}

fn bytes(weight: &[bf16]) -> Vec<u8> {
    weight.iter().flat_map(|w| w.to_ne_bytes()).collect()
}

#[test]
fn a_streamed_head_draws_what_the_head_in_memory_draws() {
    let (weight, hidden) = (matrix(VOCAB, 1), matrix(ROWS, 2));
    let bias: Vec<f32> = (0..VOCAB).map(|i| (i % 7) as f32 * 0.1).collect();
    let input = Matrix::new(&hidden, ROWS, HIDDEN).unwrap();
    let head = Head::new(Matrix::new(&weight, VOCAB, HIDDEN).unwrap()).unwrap();
    let head = head.with_vocab_size(900).unwrap().with_bias(&bias).unwrap().with_soft_cap(20.0).unwrap();
    let streamed = StreamHead {
        vocab_size: 900,
        bias: Some(&bias),
        soft_cap: Some(20.0),
        ..StreamHead::new(VOCAB, HIDDEN, DType::BF16)
    };
    let plan = Plan { max_rows: ROWS, max_draws: 50, max_logprobs: Some(3), canonical: false };
    let rows: Vec<RowParams<'_>> = (0..ROWS)
        .map(|r| RowParams { seed: 5, position: r as u64, draws: 50, logprobs: Some(3), ..Default::default() })
        .collect();
    let (mut a, mut b) = (Samples::new(), Samples::new());
    for group in [64, 128, 448, 4096] {
        Online::new(head, plan, group, &CpuOptions::default()).unwrap().sample(input, &rows, &mut a).unwrap();
        let mut stream = OnlineStream::new(streamed, plan, group, &CpuOptions::default()).unwrap();
        // Twice, to detect state that remains from the first call.
        for _ in 0..2 {
            stream.sample(&mut bytes(&weight).as_slice(), input, &rows, &mut b).unwrap();
            for r in 0..ROWS {
                let (a, b) = (a.row(r).unwrap(), b.row(r).unwrap());
                assert_eq!((a.draws, a.log_z, a.top), (b.draws, b.log_z, b.top), "group {group}");
            }
        }
    }
}

#[test]
fn a_reader_that_ends_early_is_named() {
    let (weight, hidden) = (matrix(VOCAB, 1), matrix(1, 2));
    let input = Matrix::new(&hidden, 1, HIDDEN).unwrap();
    let head = StreamHead::new(VOCAB, HIDDEN, DType::BF16);
    let mut stream = OnlineStream::new(head, Plan::default(), 256, &CpuOptions::default()).unwrap();
    let mut out = Samples::new();
    let raw = bytes(&weight);
    let short = stream.sample(&mut &raw[..raw.len() - 1], input, &[RowParams::default()], &mut out);
    assert!(matches!(short, Err(StreamError::Read { token: 768, .. })));
    stream.sample(&mut raw.as_slice(), input, &[RowParams::default()], &mut out).unwrap();
    assert!(out.row(0).is_ok());
}

#[test]
fn bad_plans_and_rows_are_named() {
    let head = StreamHead::new(VOCAB, HIDDEN, DType::BF16);
    let options = CpuOptions::default();
    let plan = Plan::default();
    assert!(matches!(OnlineStream::new(head, plan, 100, &options), Err(CpuError::GroupSize { size: 100 })));
    let canonical = Plan { canonical: true, ..plan };
    assert!(matches!(OnlineStream::new(head, canonical, 64, &options), Err(CpuError::Unsupported { .. })));
    for bad in [
        StreamHead { vocab_size: VOCAB + 1, ..head },
        StreamHead { vocab_size: 0, ..head },
        StreamHead { bias: Some(&[0.0]), ..head },
        StreamHead { scale: f32::NAN, ..head },
        StreamHead { hidden: 0, ..head },
    ] {
        assert!(matches!(OnlineStream::new(bad, plan, 64, &options), Err(CpuError::Head(_))));
    }
    let nan = vec![bf16::NAN; HIDDEN];
    let mut stream = OnlineStream::new(head, plan, 64, &options).unwrap();
    let mut out = Samples::new();
    let raw = bytes(&matrix(VOCAB, 1));
    stream
        .sample(&mut raw.as_slice(), Matrix::new(&nan, 1, HIDDEN).unwrap(), &[RowParams::default()], &mut out)
        .unwrap();
    assert_eq!(out.row(0).unwrap_err(), RowError::NaN { token: 0 });
}
