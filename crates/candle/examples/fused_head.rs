//! A head of real size that draws from hidden states: `cargo run --release -p flash-sampling-candle --example fused_head`.

use candle_core::{DType, Device, Result, Tensor};
use flash_sampling::{CpuOptions, Plan, RowParams, Samples};
use flash_sampling_candle::{FusedHead, HeadOptions};

fn main() -> Result<()> {
    let weight = Tensor::randn(0f32, 0.05, (32_000, 512), &Device::Cpu)?.to_dtype(DType::BF16)?;
    let hidden = Tensor::randn(0f32, 1.0, (2, 512), &Device::Cpu)?;
    let plan = Plan { max_rows: 2, max_draws: 4, max_logprobs: Some(0), ..Plan::default() };
    let mut head = FusedHead::new(weight, HeadOptions::default(), plan, &CpuOptions::default())?;

    // The parameters of a row: its seed, and the position of the token in its sequence.
    let row = RowParams { seed: 7, temperature: 0.8, draws: 4, ..RowParams::default() };
    let rows = [RowParams { position: 17, ..row }, RowParams { position: 90, logprobs: Some(0), ..row }];
    println!("{}", head.draw(&hidden, &rows)?);

    let mut samples = Samples::new();
    head.sample(&hidden, &rows, &mut samples)?;
    let second = samples.row(1).map_err(candle_core::Error::wrap)?;
    for draw in second.draws {
        println!("token {}, log-probability {:?}", draw.token, second.log_prob(draw.logit));
    }
    Ok(())
}
