//! A head in device memory, with hidden states of both kinds of logits, and the parameters of every call.

use crate::args::GpuArgs;
use crate::gpu::read::driver;
use cudarc::driver::{CudaSlice, CudaStream};
use flash_sampling::cuda::DeviceAddress;
use flash_sampling::cuda::abi::Row;
use flash_sampling::cuda::{DeviceHead, DeviceMatrix, DeviceScales, DeviceShadow, ShadowMemory};
use flash_sampling::{DType, Matrix, make_shadow};
use flash_sampling_cli::args::BenchSize;
use flash_sampling_cli::bench::cases::Inputs;
use flash_sampling_cli::error::CommandError;
use flash_sampling_cli::input::synthetic::Logits;
use float8::F8E4M3;
use rayon::prelude::*;
use std::sync::Arc;

/// A weight `[vocab, hidden]`, and the hidden states of each kind for the largest batch, made as for the CPU.
#[derive(Debug)]
pub struct OnDevice {
    weight: DeviceMatrix,
    gaussian: DeviceMatrix,
    peaked: DeviceMatrix,
    shadow: Option<DeviceShadow>,
    fp8: Option<(DeviceMatrix, DeviceScales)>,
    _held: [CudaSlice<u8>; 3],
    _held_shadow: Option<ShadowMemory>,
    _held_fp8: Option<(CudaSlice<u8>, CudaSlice<f32>)>,
}

impl OnDevice {
    /// Makes the inputs on the host, on all processors, and copies them; and a shadow of the weight and the weight in fp8,
    /// if requested.
    ///
    /// # Errors
    /// Too little memory, on the host or the device.
    pub fn new(size: &BenchSize, rows: usize, args: &GpuArgs, stream: &Arc<CudaStream>) -> Result<Self, CommandError> {
        let inputs = Inputs::new(size.vocab, size.hidden, rows, args.sizes.dtype)?;
        let (weight, held_weight) = copy(inputs.weight()?, stream)?;
        let (gaussian, held_gaussian) = copy(inputs.states(Logits::Gaussian, rows)?, stream)?;
        let (peaked, held_peaked) = copy(inputs.states(Logits::Peaked, rows)?, stream)?;
        let shadow = if args.shadow { Some(shadow_of(inputs.weight()?, stream)?) } else { None };
        let (shadow, _held_shadow) = shadow.unzip();
        let (fp8, _held_fp8) = if args.fp8 { Some(fp8_of(inputs.weight()?, stream)?) } else { None }.unzip();
        stream.synchronize().map_err(driver("copy the inputs"))?;
        let _held = [held_weight, held_gaussian, held_peaked];
        Ok(OnDevice { weight, gaussian, peaked, shadow, fp8, _held, _held_shadow, _held_fp8 })
    }

    /// The weight.
    pub fn weight(&self) -> DeviceMatrix {
        self.weight
    }

    /// The weight as a head without bias, cap or scale.
    pub fn head(&self) -> DeviceHead {
        DeviceHead::of(self.weight)
    }

    /// The shadow of the weight.
    pub fn shadow(&self) -> Option<DeviceShadow> {
        self.shadow
    }

    /// The weight in fp8, as a head with a scale for each row.
    pub fn fp8(&self) -> Option<DeviceHead> {
        self.fp8.map(|(weight, scales)| DeviceHead { weight, scales: Some(scales), ..self.head() })
    }

    /// The first rows of hidden states.
    pub fn states(&self, logits: Logits, rows: usize) -> DeviceMatrix {
        let all = match logits {
            Logits::Gaussian => self.gaussian,
            Logits::Peaked => self.peaked,
        };
        DeviceMatrix { rows: rows.min(all.rows), ..all }
    }

    /// The rows of the largest batch.
    pub fn rows(&self) -> usize {
        self.peaked.rows
    }
}

/// Makes the shadow of a weight on all processors, and copies it to device memory.
fn shadow_of(weight: Matrix<'_>, stream: &Arc<CudaStream>) -> Result<(DeviceShadow, ShadowMemory), CommandError> {
    let buffer = make_shadow(&weight).map_err(|error| CommandError::usage(error.to_string()))?;
    DeviceShadow::upload(&buffer.shadow(), stream).map_err(|error| CommandError::usage(error.to_string()))
}

/// A weight in fp8, and its memory.
type Fp8 = ((DeviceMatrix, DeviceScales), (CudaSlice<u8>, CudaSlice<f32>));

/// Rounds a weight to fp8 with a scale for each row, and copies it to device memory.
fn fp8_of(weight: Matrix<'_>, stream: &Arc<CudaStream>) -> Result<Fp8, CommandError> {
    const LARGEST: f32 = 448.0;
    let (rows, cols) = (weight.rows(), weight.cols());
    let mut codes = vec![0; rows * cols];
    let round = |(row, to): (usize, &mut [u8])| {
        let mut values = vec![0.0; cols];
        weight.row_to_f32(row, &mut values);
        let most = values.iter().fold(0.0f32, |most, value| most.max(value.abs()));
        let scale = if most > 0.0 { most / LARGEST } else { 1.0 };
        to.iter_mut().zip(values).for_each(|(code, value)| *code = F8E4M3::from_f32(value / scale).to_bits());
        scale
    };
    let scales: Vec<f32> = codes.par_chunks_mut(cols).enumerate().map(round).collect();
    let failed = driver("copy the weight in fp8");
    let held = (stream.clone_htod(&codes).map_err(&failed)?, stream.clone_htod(&scales).map_err(&failed)?);
    let (address, dtype) = (DeviceAddress::of(&held.0, stream), DType::F8_E4M3);
    let scales = DeviceScales { address: DeviceAddress::of(&held.1, stream), block: [1, cols], row_of_block: 0 };
    Ok(((DeviceMatrix { address, dtype, rows, cols, row_stride: cols }, scales), held))
}

/// Copies a matrix to device memory; the second value owns this memory.
///
/// # Errors
/// Errors of the driver.
pub fn copy(matrix: Matrix<'_>, stream: &Arc<CudaStream>) -> Result<(DeviceMatrix, CudaSlice<u8>), CommandError> {
    let held = stream.clone_htod(matrix.bytes()).map_err(driver("copy the inputs"))?;
    let (rows, cols) = (matrix.rows(), matrix.cols());
    let address = DeviceAddress::of(&held, stream);
    Ok((DeviceMatrix { address, dtype: matrix.dtype(), rows, cols, row_stride: cols }, held))
}

/// The parameters of successive calls, uploaded beforehand. Each call uses the next ones, so no call repeats the noise
/// of another, and only the call itself is timed.
#[derive(Debug)]
pub struct Calls {
    rows: DeviceAddress<Row>,
    positions: DeviceAddress<u64>,
    of_call: usize,
    calls: usize,
    next: usize,
    _held: (CudaSlice<Row>, CudaSlice<u64>),
}

impl Calls {
    /// Parameters of `calls` calls of `rows` rows each: the seed is the row, the position is the call.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn new(rows: usize, calls: usize, greedy: bool, stream: &Arc<CudaStream>) -> Result<Self, CommandError> {
        let row = |call: u64, seed: u64| Row {
            seed,
            position: call,
            inv_temperature: 1.0,
            greedy: greedy.into(),
            ..Row::default()
        };
        let of_call = |call| (0..rows as u64).map(move |seed| row(call, seed));
        let params: Vec<Row> = (0..calls as u64).flat_map(of_call).collect();
        let positions: Vec<u64> = params.iter().map(|row| row.position).collect();
        let failed = driver("copy the parameters of the calls");
        let held = (stream.clone_htod(&params).map_err(&failed)?, stream.clone_htod(&positions).map_err(&failed)?);
        let (rows_at, positions_at) = (DeviceAddress::of(&held.0, stream), DeviceAddress::of(&held.1, stream));
        stream.synchronize().map_err(&failed)?;
        Ok(Calls { rows: rows_at, positions: positions_at, of_call: rows, calls, next: 0, _held: held })
    }

    /// Returns the device addresses of the next call's rows and positions; the first call follows the last one.
    pub fn advance(&mut self) -> (DeviceAddress<Row>, DeviceAddress<u64>) {
        let at = self.next % self.calls * self.of_call;
        self.next += 1;
        (self.rows.add(at), self.positions.add(at))
    }
}
