//! The line that an app changes: `cargo run --release -p flash-sampling-candle --example logits_processor`.

use candle_core::{Device, Result, Tensor};
// Before: use candle_transformers::generation::LogitsProcessor;
use flash_sampling_candle::LogitsProcessor;

fn main() -> Result<()> {
    let mut processor = LogitsProcessor::new(299_792_458, Some(0.8), None);
    let logits = Tensor::randn(0f32, 3.0, 32_000, &Device::Cpu)?;
    for _ in 0..5 {
        println!("token {}", processor.sample(&logits)?);
    }
    Ok(())
}
