//! A shadow in a file is the shadow that was written, or an error that names the difference.
#![cfg(feature = "shadow-file")]

use flash_sampling::{
    DType, Matrix, Shadow, ShadowBuffer, ShadowFile, ShadowFileError, bf16, make_shadow, write_shadow,
};
use std::io::{self, Write};

const ROWS: usize = 300;
const COLS: usize = 70;

fn floats(salt: f32) -> Vec<f32> {
    (0..ROWS * COLS).map(|i| (i as f32 * 0.7 + salt).sin()).collect()
}

fn matrix(floats: &[f32]) -> Matrix<'_> {
    Matrix::new(floats, ROWS, COLS).unwrap()
}

fn file(shadow: Shadow<'_>, weight: &Matrix<'_>) -> Vec<u8> {
    let mut bytes = Vec::new();
    write_shadow(&shadow, weight, &mut bytes).unwrap();
    bytes
}

/// A small shadow in a file, and its weight.
fn small() -> (Vec<u8>, [f32; 6]) {
    let floats = [0.5, -1.0, 2.0, 0.25, 0.0, 3.0];
    let weight = Matrix::new(&floats, 3, 2).unwrap();
    (file(make_shadow(&weight).unwrap().shadow(), &weight), floats)
}

fn parts<'a>(shadow: &Shadow<'a>) -> (&'a [i8], [&'a [f32]; 3], usize) {
    (shadow.codes(), [shadow.scales(), shadow.errors(), shadow.norms()], shadow.cols())
}

#[test]
fn a_file_has_the_shadow_that_was_written() {
    let floats = floats(0.0);
    let halves: Vec<bf16> = floats.iter().map(|&value| bf16::from_f32(value)).collect();
    for weight in [matrix(&floats), Matrix::new(&halves, ROWS, COLS).unwrap()] {
        let buffer = make_shadow(&weight).unwrap();
        let bytes = file(buffer.shadow(), &weight);
        assert!(bytes == file(ShadowBuffer::new(&weight).unwrap().shadow(), &weight));
        let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        assert_eq!((8 + header) % 64, 0);
        // The bytes may lie at any address.
        let moved = [&[0], &*bytes].concat();
        assert_eq!(parts(&ShadowFile::new(&moved[1..], &weight).unwrap().shadow()), parts(&buffer.shadow()));
        // A weight with a stride has the same values, and so the same shadow.
        let stride = COLS + 2;
        let mut wide = vec![0; ROWS * stride * weight.dtype().bytes(1).unwrap()];
        for row in 0..ROWS {
            let bytes = weight.row_bytes(row);
            wide[row * bytes.len() / COLS * stride..][..bytes.len()].copy_from_slice(bytes);
        }
        let wide = Matrix::from_bytes(&wide, weight.dtype(), ROWS, COLS, stride).unwrap();
        assert!(ShadowFile::new(bytes, &wide).is_ok());
    }
}

#[test]
fn the_shadow_of_another_weight_is_refused() {
    let (own, other) = (floats(0.0), floats(1e-3));
    let weight = matrix(&own);
    let bytes = file(make_shadow(&weight).unwrap().shadow(), &weight);
    let property = |weight: &Matrix<'_>| match ShadowFile::new(&*bytes, weight) {
        Err(ShadowFileError::Weight { property, found, expected }) => {
            assert_ne!(found, expected);
            property
        }
        other => panic!("{other:?}"),
    };
    let halves = vec![bf16::ONE; ROWS * COLS];
    assert_eq!(property(&Matrix::new(&halves, ROWS, COLS).unwrap()), "weight_dtype");
    assert_eq!(property(&weight.row_range(1..ROWS)), "weight_shape");
    assert_eq!(property(&Matrix::new(&own, COLS, ROWS).unwrap()), "weight_shape");
    assert_eq!(property(&matrix(&other)), "weight_digest");
    let mut one_bit = own.clone();
    one_bit[12_345] = f32::from_bits(one_bit[12_345].to_bits() ^ 1);
    assert_eq!(property(&matrix(&one_bit)), "weight_digest");
    let error = ShadowFile::new(&*bytes, &weight.row_range(1..ROWS)).unwrap_err().to_string();
    assert_eq!(error, "the shadow of another weight: its weight_shape is [300, 70], but the head's is [299, 70]");
}

/// Also the test that every byte of a file is checked: the bytes of a header are the only ones that may change.
#[test]
fn truncated_and_altered_files_are_errors() {
    let (bytes, floats) = small();
    let weight = Matrix::new(&floats, 3, 2).unwrap();
    for length in 0..bytes.len() {
        let error = ShadowFile::new(&bytes[..length], &weight).unwrap_err();
        assert!(matches!(error, ShadowFileError::Format(_)), "{length} bytes: {error}");
    }
    assert!(ShadowFile::new([&*bytes, &[0]].concat(), &weight).is_err());
    let data = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let whole = ShadowFile::new(&*bytes, &weight).unwrap();
    for at in 0..bytes.len() {
        for bit in 0..8 {
            let mut altered = bytes.clone();
            altered[at] ^= 1 << bit;
            match ShadowFile::new(altered, &weight) {
                Ok(file) => {
                    assert!(at < data, "byte {at}");
                    assert_eq!(parts(&file.shadow()), parts(&whole.shadow()), "byte {at}");
                }
                Err(ShadowFileError::Damaged { .. }) => {}
                Err(error) => assert!(at < data, "byte {at}: {error}"),
            }
        }
    }
}

#[test]
fn files_that_are_no_shadow_are_named() {
    let (bytes, floats) = small();
    let weight = Matrix::new(&floats, 3, 2).unwrap();
    let text = String::from_utf8_lossy(&bytes).into_owned();
    let altered = |from: &str, to: &str| {
        assert_eq!(from.len(), to.len());
        let at = text.find(from).unwrap();
        [&bytes[..at], to.as_bytes(), &bytes[at + from.len()..]].concat()
    };
    let error = |bytes: Vec<u8>| ShadowFile::new(bytes, &weight).unwrap_err().to_string();
    assert_eq!(error(altered("weight_shape", "weight_shapf")), "the file is not a shadow: it has no weight_shape");
    assert_eq!(error(altered("\"digest\"", "\"digesu\"")), "the file is not a shadow: it has no digest");
    assert_eq!(error(altered("\"norms\"", "\"normt\"")), "the file is not a shadow: it has no norms");
    assert_eq!(error(altered("\"I8\"", "\"U8\"")), "codes is U8 [3, 64], but must be I8 [3, 64]");
    assert_eq!(error(altered("[3,64]", "[64,3]")), "codes is I8 [64, 3], but must be I8 [3, 64]");
    for bytes in [&b""[..], b"\xff\xff\xff\xff\xff\xff\xff\xff{}"] {
        assert!(error(bytes.into()).starts_with("the file is truncated or not a shadow: "));
    }
}

#[test]
fn only_the_shadow_of_the_weight_is_written() {
    /// A file on a full disk.
    struct Full;
    impl Write for Full {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(io::ErrorKind::StorageFull.into())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let floats = floats(0.0);
    let weight = matrix(&floats);
    let buffer = make_shadow(&weight).unwrap();
    let error = write_shadow(&buffer.shadow(), &weight, &mut Full).unwrap_err();
    assert!(matches!(error, ShadowFileError::Write(error) if error.kind() == io::ErrorKind::StorageFull));
    let error = write_shadow(&buffer.shadow(), &weight.row_range(0..9), &mut Vec::new()).unwrap_err();
    assert_eq!(error.to_string(), "a shadow [300, 70] does not fit a weight [9, 70]");
    let bytes = [0; 9 * 70];
    let eight_bit = Matrix::from_bytes(&bytes, DType::I8, 9, 70, 70).unwrap();
    let error = write_shadow(&buffer.shadow().row_range(0..9), &eight_bit, &mut Vec::new()).unwrap_err();
    assert!(error.to_string().starts_with("a weight of type i8 has no shadow: it must be bf16, f16 or f32; "));
}
